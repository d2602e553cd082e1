//! The network between nodes: boxes in memory, by sender and receiver.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tierbed_core::Result;
use tierbed_exchange::{Agreement, Exchange, LookupRows, Output, UpdateRows, Wants};

use super::Batch;

/// Messages from one rank to another.
type Boxes = HashMap<(usize, usize), VecDeque<Vec<u8>>>;

/// Messages under way, first in first out for each pair of ranks.
#[derive(Debug, Default)]
pub(crate) struct Network {
    boxes: Mutex<Boxes>,
    came: Condvar,
    /// Bytes between nodes.
    pub(crate) bytes: Mutex<usize>,
}

/// One rank's way to the ranks of its rail.
#[derive(Debug, Clone)]
pub(crate) struct Rail {
    pub(crate) network: Arc<Network>,
    rank: usize,
    peers: Vec<usize>,
}

impl Rail {
    pub(crate) fn new(network: &Arc<Network>, exchange: &Exchange) -> Self {
        let (rank, nodes) = (exchange.rank(), exchange.nodes());
        let peers =
            (0..nodes.count()).map(|node| nodes.ranks_of(node).start + rank % nodes.ranks_each());
        Self { network: network.clone(), rank, peers: peers.collect() }
    }

    /// Sends `sent[node]` bytes of `bytes` to each node; returns what came, and its lengths.
    fn swap(&self, bytes: &[u8], sent: &[usize]) -> (Vec<u8>, Vec<usize>) {
        let mut boxes = self.network.boxes.lock().unwrap();
        let mut rest = bytes;
        for (&peer, &count) in self.peers.iter().zip(sent) {
            let (own, later) = rest.split_at(count);
            rest = later;
            boxes.entry((self.rank, peer)).or_default().push_back(own.to_vec());
            *self.network.bytes.lock().unwrap() += count;
        }
        assert!(rest.is_empty(), "every byte has a receiver");
        self.network.came.notify_all();
        let (mut came, mut lengths) = (Vec::new(), Vec::new());
        for &peer in &self.peers {
            let message = loop {
                if let Some(message) = boxes.entry((peer, self.rank)).or_default().pop_front() {
                    break message;
                }
                let waited = self.network.came.wait_timeout(boxes, Duration::from_secs(20));
                let (back, timeout) = waited.unwrap();
                assert!(!timeout.timed_out(), "rank {peer} sends nothing to rank {}", self.rank);
                boxes = back;
            };
            lengths.push(message.len());
            came.extend(message);
        }
        (came, lengths)
    }

    fn ask(&self, exchange: &Exchange, lengths: &[usize]) -> (Vec<u8>, Vec<usize>) {
        let mut question = vec![0; lengths.iter().sum()];
        exchange.write_questions(&mut question).unwrap();
        self.swap(&question, lengths)
    }

    pub(crate) fn announce(&self, exchange: &mut Exchange, batch: &Batch) {
        if exchange.nodes().count() == 1 {
            return exchange.announce(&batch.bags()).unwrap();
        }
        let lengths = exchange.ask_ahead(&batch.bags()).unwrap();
        let (came, lengths) = self.ask(exchange, &lengths);
        exchange.hear_ahead(&came, &lengths).unwrap();
    }

    #[expect(clippy::too_many_arguments, reason = "as the calls of an exchange")]
    pub(crate) fn forward(
        &self,
        exchange: &mut Exchange,
        batch: &Batch,
        wants: Wants,
        parts: usize,
        rows: &mut impl LookupRows,
    ) -> Result<Output> {
        if exchange.nodes().count() == 1 && parts == 1 {
            return exchange.forward(&batch.bags(), wants, rows);
        }
        if exchange.nodes().count() == 1 {
            let arrivals = exchange.forward_parts(&batch.bags(), wants, parts)?;
            exchange.serve(rows)?;
            return arrivals.output();
        }
        let agreed = exchange.find_announced(&batch.bags(), wants, parts)?;
        let agreed = agreed.map(|own| {
            let told = [own.least.to_le_bytes(), own.most.to_le_bytes()].concat();
            let (came, _) = self.swap(&told.repeat(self.peers.len()), &vec![16; self.peers.len()]);
            let word = |at: usize| u64::from_le_bytes(came[at * 8..][..8].try_into().unwrap());
            let count = self.peers.len();
            Agreement {
                least: (0..count).map(|at| word(2 * at)).min().unwrap(),
                most: (0..count).map(|at| word(2 * at + 1)).max().unwrap(),
            }
        });
        let arrivals = match agreed.filter(|agreed| agreed.of_all().is_some()) {
            Some(agreed) => exchange.look_up_announced(agreed, wants)?,
            None => {
                let lengths = exchange.ask(&batch.bags(), wants, parts)?;
                let (came, lengths) = self.ask(exchange, &lengths);
                exchange.hear(&came, &lengths)?
            }
        };
        for part in 0..parts {
            let bytes = exchange.answer_bytes(part)?;
            let mut answers = vec![0; bytes.sent.iter().sum()];
            exchange.answer(part, rows, &mut answers)?;
            let (came, lengths) = self.swap(&answers, &bytes.sent);
            assert_eq!(lengths, bytes.received, "both sides know the bytes of answers");
            exchange.deliver(part, &came)?;
        }
        exchange.finish_lookup()?;
        arrivals.output()
    }

    #[expect(clippy::too_many_arguments, reason = "as the calls of an exchange")]
    pub(crate) fn backward(
        &self,
        exchange: &mut Exchange,
        step: u64,
        grad: &[f32],
        weight_grads: Option<&mut [f32]>,
        rows: &mut impl UpdateRows,
    ) -> Result<()> {
        if exchange.nodes().count() == 1 {
            return exchange.backward(step, grad, weight_grads, rows);
        }
        let bytes = exchange.put_all_grads(step, grad)?;
        let mut sent = vec![0; bytes.sent.iter().sum()];
        exchange.write_grads(&mut sent)?;
        let (came, lengths) = self.swap(&sent, &bytes.sent);
        assert_eq!(lengths, bytes.received, "both sides know the bytes of gradients");
        let bytes = exchange.update(rows, &came)?;
        let mut sent = vec![0; bytes.sent.iter().sum()];
        exchange.write_weight_grads(&mut sent)?;
        let (came, lengths) = self.swap(&sent, &bytes.sent);
        assert_eq!(lengths, bytes.received, "both sides know the bytes of weights' gradients");
        exchange.finish_backward(&came, grad, weight_grads)
    }
}
