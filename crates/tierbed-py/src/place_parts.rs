//! Parts of a placement, for builds on several machines. Parts are bytes: they travel.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_core::{Error, Result};
use tierbed_placement::partition::{order_of_parts, Subtree};
use tierbed_placement::replicate::{
    best_bases, connectivity_pages, connectivity_scores, with_connectivity_pages,
};
use tierbed_placement::{Placement, ReplicaBudget};

use crate::errors::run;
use crate::placement::{GivenPlace, NativePlacement, NativeQueryLog};
use crate::plain::Plain;

/// Adds this module's functions.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(bisection_begin, module)?)?;
    module.add_function(wrap_pyfunction!(bisection_split, module)?)?;
    module.add_function(wrap_pyfunction!(bisection_order, module)?)?;
    module.add_function(wrap_pyfunction!(bisection_end, module)?)?;
    module.add_function(wrap_pyfunction!(placement_scores, module)?)?;
    module.add_function(wrap_pyfunction!(placement_bases, module)?)?;
    module.add_function(wrap_pyfunction!(placement_pages, module)?)?;
    module.add_function(wrap_pyfunction!(placement_with_pages, module)?)
}

/// Returns the part above all others, and how many pages it will become.
#[pyfunction]
fn bisection_begin<'py>(
    py: Python<'py>,
    log: &Bound<'py, NativeQueryLog>,
    options: Plain<GivenPlace>,
) -> PyResult<(Bound<'py, PyBytes>, usize)> {
    let log = Arc::clone(&log.get().log);
    let (part, page_count) = run(py, || {
        let part = Subtree::of_log((*log).clone(), &options.0.bisection())?;
        Ok((part.encode(), part.page_count()))
    })?;
    Ok((PyBytes::new(py, &part), page_count))
}

/// Splits a part of two pages or more.
#[pyfunction]
fn bisection_split<'py>(
    py: Python<'py>,
    part: &[u8],
    options: Plain<GivenPlace>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let [left, right] = run(py, || {
        let children = Subtree::decode(part)?.split(&options.0.bisection())?;
        let children = children.ok_or_else(|| Error::invalid("a page cannot be split"))?;
        Ok(children.map(|child| child.encode()))
    })?;
    Ok((PyBytes::new(py, &left), PyBytes::new(py, &right)))
}

/// Splits a part down to pages; returns its rows in order, u32 little-endian.
#[pyfunction]
fn bisection_order<'py>(
    py: Python<'py>,
    part: &[u8],
    options: Plain<GivenPlace>,
) -> PyResult<Bound<'py, PyBytes>> {
    let order = run(py, || Subtree::decode(part)?.order(&options.0.bisection()))?;
    let bytes: Vec<u8> = order.iter().flat_map(|row| row.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Puts the rows of parts, in their order, on pages.
#[pyfunction]
fn bisection_end(
    py: Python<'_>,
    orders: Vec<Vec<u8>>,
    row_count: u32,
    rows_per_page: u32,
) -> PyResult<NativePlacement> {
    run(py, || {
        let parts = orders.iter().map(|bytes| numbers(bytes, u32::from_le_bytes));
        let parts = parts.collect::<Result<Vec<Vec<u32>>>>()?;
        let order = order_of_parts(&parts, row_count)?;
        NativePlacement::in_page_order(Placement::from_order(&order, rows_per_page)?)
    })
}

/// Returns every row's connectivity in a part of the log, u64 little-endian.
#[pyfunction]
fn placement_scores<'py>(
    homes: &Bound<'py, NativePlacement>,
    log: &Bound<'py, NativeQueryLog>,
) -> PyResult<Bound<'py, PyBytes>> {
    let py = homes.py();
    let (homes, log) = (Arc::clone(&homes.get().placement), Arc::clone(&log.get().log));
    let scores = run(py, || connectivity_scores(&homes, &log))?;
    let bytes: Vec<u8> = scores.iter().flat_map(|score| score.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Returns the rows that replica pages are made for, best first, by the scores of all parts.
#[pyfunction]
fn placement_bases(
    py: Python<'_>,
    scores: Vec<Vec<u8>>,
    rows_per_page: u32,
    ratio: f64,
) -> PyResult<Vec<u32>> {
    run(py, || {
        let mut sums: Vec<u64> = Vec::new();
        for part in &scores {
            let part = numbers(part, u64::from_le_bytes)?;
            if sums.is_empty() {
                sums.resize(part.len(), 0);
            }
            if part.len() != sums.len() {
                return Err(Error::invalid("scores are of different tables"));
            }
            sums.iter_mut().zip(&part).for_each(|(sum, score)| *sum += score);
        }
        let row_count = u32::try_from(sums.len()).unwrap_or(u32::MAX);
        let budget = ReplicaBudget::of_ratio(ratio, row_count, rows_per_page)?;
        Ok(best_bases(&sums, budget.page_count as usize))
    })
}

/// Returns the replica page of each of `bases`.
#[pyfunction]
fn placement_pages(
    homes: &Bound<'_, NativePlacement>,
    log: &Bound<'_, NativeQueryLog>,
    bases: Vec<u32>,
) -> PyResult<Vec<Vec<u32>>> {
    let py = homes.py();
    let (homes, log) = (Arc::clone(&homes.get().placement), Arc::clone(&log.get().log));
    run(py, || connectivity_pages(&homes, &log, &bases))
}

/// Adds replica pages, those of the best bases first, as far as the ratio allows.
#[pyfunction]
fn placement_with_pages(
    homes: &Bound<'_, NativePlacement>,
    pages: Vec<Vec<u32>>,
    ratio: f64,
) -> PyResult<NativePlacement> {
    let py = homes.py();
    let homes = Arc::clone(&homes.get().placement);
    run(py, || {
        let pages = pages.iter().map(Vec::as_slice);
        NativePlacement::in_page_order(with_connectivity_pages(&homes, pages, ratio)?)
    })
}

fn numbers<const BYTES: usize, N>(bytes: &[u8], read: fn([u8; BYTES]) -> N) -> Result<Vec<N>> {
    let (words, tail) = bytes.as_chunks::<BYTES>();
    if !tail.is_empty() {
        return Err(Error::corruption("part of a placement is cut short"));
    }
    Ok(words.iter().map(|word| read(*word)).collect())
}
