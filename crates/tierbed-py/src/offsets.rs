//! Bounds of bags from their lengths, in one pass.

use pyo3::prelude::*;
use tierbed_core::{Error, Result};

use crate::errors::to_python;
use crate::tensors::{check_disjoint, Tensor};

/// Fills `out` `[N+1]` i64 with the bounds of bags of `lengths` `[N]`, i32 or i64 as `is_short`
/// says.
#[pyfunction]
fn fill_offsets(
    lengths: &Bound<'_, PyAny>,
    is_short: bool,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = out.py();
    let mut out = Tensor::<i64>::import(out, "out")?;
    let filled = if is_short {
        let lengths = Tensor::<i32>::import(lengths, "lengths")?;
        check_disjoint(&[out.place()], &[lengths.place()])
            .and_then(|()| fill(lengths.view(), out.view_mut()?))
    } else {
        let lengths = Tensor::<i64>::import(lengths, "lengths")?;
        check_disjoint(&[out.place()], &[lengths.place()])
            .and_then(|()| fill(lengths.view(), out.view_mut()?))
    };
    filled.map_err(|error| to_python(py, &error))
}

// What overflows or falls is no bag: a lookup refuses it.
fn fill<T: Copy + Into<i64>>(lengths: &[T], out: &mut [i64]) -> Result<()> {
    let sizes = (lengths.len() + 1, out.len());
    let Some((first, ends)) = out.split_first_mut().filter(|_| sizes.0 == sizes.1) else {
        return Err(Error::invalid("out must have one value more than lengths")
            .with("lengths", lengths.len())
            .with("out", sizes.1));
    };
    *first = 0;
    let mut end = 0i64;
    for (place, &length) in ends.iter_mut().zip(lengths) {
        end = end.wrapping_add(length.into());
        *place = end;
    }
    Ok(())
}

/// Adds the function to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(fill_offsets, module)?)
}
