//! Messages between nodes, for Python, which sends them.

use pyo3::prelude::*;
use tierbed_core::Result;
use tierbed_exchange::{Agreement, Exchange, RailBytes, Wants};

use crate::batch::BatchTensors;
use crate::errors::to_python;
use crate::exchange::{NativeArrivals, RankExchange, RankStore};
use crate::tensors::{check_disjoint, Tensor};

/// One rank's part in lookups of several nodes. All ranks make the same calls in the same order.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeRail {
    pub(crate) rank: RankExchange,
}

fn by_node(bytes: RailBytes) -> (Vec<usize>, Vec<usize>) {
    (bytes.sent, bytes.received)
}

impl NativeRail {
    fn with_bags<T: Send>(
        &self,
        py: Python<'_>,
        batch: &BatchTensors,
        work: impl FnOnce(&mut Exchange, &tierbed_core::Bags<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let bags = batch.bags(self.rank.feature_count).map_err(|error| to_python(py, &error))?;
        self.rank.run(py, |exchange| work(exchange, &bags))
    }

    fn write(
        &self,
        to: &Bound<'_, PyAny>,
        work: impl FnOnce(&Exchange, &mut [u8]) -> Result<()> + Send,
    ) -> PyResult<()> {
        let py = to.py();
        let mut to = Tensor::<u8>::import(to, "to")?;
        let to = to.view_mut().map_err(|error| to_python(py, &error))?;
        self.rank.run(py, |exchange| work(exchange, to))
    }
}

#[pymethods]
impl NativeRail {
    /// Asks the ranks of the node which announced batch this is, counted from 1; None when none was
    /// ever announced.
    #[pyo3(signature = (indices, offsets, weights, wants_backward, wants_weight_grads, parts))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn find_announced(
        &self,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        wants_backward: bool,
        wants_weight_grads: bool,
        parts: usize,
    ) -> PyResult<Option<(u64, u64)>> {
        let wants = Wants { backward: wants_backward, weight_grads: wants_weight_grads };
        let found = self.with_bags(
            indices.py(),
            &BatchTensors::import(indices, offsets, weights)?,
            |exchange, bags| exchange.find_announced(bags, wants, parts),
        )?;
        Ok(found.map(|agreed| (agreed.least, agreed.most)))
    }

    /// Begins the lookup of an announced batch that all ranks agreed upon.
    fn look_up_announced(
        &self,
        py: Python<'_>,
        number: u64,
        wants_backward: bool,
        wants_weight_grads: bool,
    ) -> PyResult<NativeArrivals> {
        let wants = Wants { backward: wants_backward, weight_grads: wants_weight_grads };
        let agreed = Agreement { least: number, most: number };
        let arrivals = self.rank.run(py, |exchange| exchange.look_up_announced(agreed, wants))?;
        Ok(NativeArrivals { arrivals })
    }

    /// Publishes a batch; returns the bytes of the questions to each node.
    #[pyo3(signature = (indices, offsets, weights, wants_backward, wants_weight_grads, parts))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn ask(
        &self,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        wants_backward: bool,
        wants_weight_grads: bool,
        parts: usize,
    ) -> PyResult<Vec<usize>> {
        let wants = Wants { backward: wants_backward, weight_grads: wants_weight_grads };
        self.with_bags(
            indices.py(),
            &BatchTensors::import(indices, offsets, weights)?,
            |exchange, bags| exchange.ask(bags, wants, parts),
        )
    }

    /// As `ask`, for a batch that is looked up later.
    #[pyo3(signature = (indices, offsets, weights))]
    fn ask_ahead(
        &self,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<usize>> {
        self.with_bags(
            indices.py(),
            &BatchTensors::import(indices, offsets, weights)?,
            Exchange::ask_ahead,
        )
    }

    /// Copies the questions into `to`.
    fn write_questions(&self, to: &Bound<'_, PyAny>) -> PyResult<()> {
        self.write(to, Exchange::write_questions)
    }

    /// Takes the questions that came, for a lookup.
    fn hear(&self, from: &Bound<'_, PyAny>, lengths: Vec<usize>) -> PyResult<NativeArrivals> {
        let bytes = Tensor::<u8>::import(from, "from")?;
        let view = bytes.view();
        let arrivals = self.rank.run(from.py(), |exchange| exchange.hear(view, &lengths))?;
        Ok(NativeArrivals { arrivals })
    }

    /// Takes the questions that came, for a batch that is looked up later.
    fn hear_ahead(&self, from: &Bound<'_, PyAny>, lengths: Vec<usize>) -> PyResult<()> {
        let bytes = Tensor::<u8>::import(from, "from")?;
        let view = bytes.view();
        self.rank.run(from.py(), |exchange| exchange.hear_ahead(view, &lengths))
    }

    /// Returns the bytes of the answers of a part, to and from each node.
    fn answer_bytes(&self, py: Python<'_>, part: usize) -> PyResult<(Vec<usize>, Vec<usize>)> {
        self.rank.run(py, |exchange| exchange.answer_bytes(part).map(by_node))
    }

    /// Looks up a part; answers to other nodes go into `to`.
    fn answer(
        &self,
        store: RankStore<'_>,
        part: usize,
        to: &Bound<'_, PyAny>,
        is_training: bool,
    ) -> PyResult<()> {
        let py = to.py();
        let mut to = Tensor::<u8>::import(to, "to")?;
        let to = to.view_mut().map_err(|error| to_python(py, &error))?;
        self.rank.with(py, &store, is_training, |exchange, rows| exchange.answer(part, rows, to))
    }

    /// Puts the answers that came where they belong.
    fn deliver(&self, part: usize, from: &Bound<'_, PyAny>) -> PyResult<()> {
        let bytes = Tensor::<u8>::import(from, "from")?;
        let view = bytes.view();
        self.rank.run(from.py(), |exchange| exchange.deliver(part, view))
    }

    /// Breaks the exchange because a rank of another node does not answer.
    fn lose(&self, py: Python<'_>, rank: usize, cause: &str) -> PyResult<()> {
        self.rank.run(py, |exchange| {
            exchange.lose(rank, cause);
            Ok(())
        })
    }

    /// Breaks the exchange because of an error of this rank.
    fn fail(&self, py: Python<'_>, cause: &str) -> PyResult<()> {
        self.rank.run(py, |exchange| {
            exchange.fail(cause);
            Ok(())
        })
    }

    /// Returns whether a failure broke the exchange.
    fn is_broken(&self, py: Python<'_>) -> PyResult<bool> {
        self.rank.run(py, |exchange| Ok(exchange.is_broken()))
    }

    /// Ends a lookup whose parts were all delivered.
    fn finish_lookup(&self, py: Python<'_>) -> PyResult<()> {
        self.rank.run(py, |exchange| exchange.finish_lookup().map(drop))
    }

    /// Begins a backward; returns the bytes of gradients to and from each node.
    fn put_grads(&self, step: u64, grad: &Bound<'_, PyAny>) -> PyResult<(Vec<usize>, Vec<usize>)> {
        let py = grad.py();
        let grad = Tensor::<f32>::import(grad, "grad")?;
        let grad = grad.view();
        self.rank.run(py, |exchange| exchange.put_all_grads(step, grad).map(by_node))
    }

    /// Copies gradients for other nodes into `to`.
    fn write_grads(&self, to: &Bound<'_, PyAny>) -> PyResult<()> {
        self.write(to, Exchange::write_grads)
    }

    /// Steps the rows; returns the bytes of gradients of weights to and from each node.
    fn update(
        &self,
        store: RankStore<'_>,
        from: &Bound<'_, PyAny>,
    ) -> PyResult<(Vec<usize>, Vec<usize>)> {
        let bytes = Tensor::<u8>::import(from, "from")?;
        let view = bytes.view();
        self.rank.with(from.py(), &store, true, |exchange, rows| {
            exchange.update(rows, view).map(by_node)
        })
    }

    /// Copies gradients of weights for other nodes into `to`.
    fn write_weight_grads(&self, to: &Bound<'_, PyAny>) -> PyResult<()> {
        self.write(to, Exchange::write_weight_grads)
    }

    /// Ends a backward; fills `weight_grads`, where they are wanted.
    #[pyo3(signature = (from, grad, weight_grads))]
    fn finish_backward(
        &self,
        from: &Bound<'_, PyAny>,
        grad: &Bound<'_, PyAny>,
        weight_grads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = grad.py();
        let bytes = Tensor::<u8>::import(from, "from")?;
        let grad = Tensor::<f32>::import(grad, "grad")?;
        let mut out =
            weight_grads.map(|tensor| Tensor::<f32>::import(tensor, "weight_grads")).transpose()?;
        let outputs: Vec<_> = out.iter().map(Tensor::place).collect();
        check_disjoint(&outputs, &[grad.place()]).map_err(|error| to_python(py, &error))?;
        let place = out.as_mut().map(Tensor::view_mut).transpose();
        let place = place.map_err(|error| to_python(py, &error))?;
        let (view, grad) = (bytes.view(), grad.view());
        self.rank.run(py, |exchange| exchange.finish_backward(view, grad, place))
    }
}
