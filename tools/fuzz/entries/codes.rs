//! Codes of rows: decoding any bytes must not panic nor differ between instruction sets.
//!
//! Codes have no checksum of their own; the pages and tiers that keep them do. What is checked
//! here is that any bytes decode to something, to the same bits on every instruction set.

use std::sync::Arc;

use tierbed_kernels::{
    Codec, Codes, Columns, Isa, Kernels, Matrix, PoolFeature, Pooling, ProductQuantizer,
};

/// Most numbers of a row here.
const DIM_MAX: usize = 80;

/// Codes of a few rows; the first three bytes choose codec, dim and parts.
pub fn codes(bytes: &[u8]) {
    let Some((head, arena)) = bytes.split_first_chunk::<3>() else { return };
    let [chosen, dim, parts] = head.map(usize::from);
    let dim = 1 + dim % DIM_MAX;
    let chosen = chosen % (Codec::FIXED.len() + 1);
    let (codec, arena) = match Codec::FIXED.get(chosen) {
        Some(codec) => (codec.clone(), arena),
        None => {
            let book_bytes = 256 * dim * size_of::<f32>();
            if arena.len() < book_bytes {
                return;
            }
            let (books, arena) = arena.split_at(book_bytes);
            let Some(codec) = product(dim, 1 + parts % dim, books) else { return };
            (codec, arena)
        }
    };
    let code_bytes = codec.code_bytes(dim);
    // Every place where a code could begin, so that the last ends with the arena.
    let starts: Vec<usize> = (0..(arena.len() + 1).saturating_sub(code_bytes)).collect();
    let codes = Codes { codec: &codec, arena, starts: &starts, weights: None };
    let mut all: Option<(Vec<u32>, Vec<u32>)> = None;
    for kernels in Isa::available().into_iter().filter_map(Kernels::with_isa) {
        let mut rows = vec![0.0; starts.len() * dim];
        kernels.decode_rows(codes, dim, &mut rows);
        let mut sum = vec![0.0; dim];
        let offsets = [0, starts.len() as i64];
        let of = PoolFeature { feature: 0, offsets: &offsets, pooling: Pooling::Sum, dim };
        let mut matrix = Matrix::new(&mut sum, std::iter::once(Columns::whole(dim)));
        kernels.pool_codes_to(&[(codes, of)], &mut matrix);
        let found = (bits(&rows), bits(&sum));
        assert!(all.get_or_insert_with(|| found.clone()) == &found, "{}", kernels.isa().name());
        recode(&codec, &rows, dim);
    }
}

/// Codebooks of any bytes, where they are ones.
fn product(dim: usize, part_count: usize, books: &[u8]) -> Option<Codec> {
    let numbers = books.chunks_exact(size_of::<f32>()).filter_map(|number| number.try_into().ok());
    let books = numbers.map(f32::from_le_bytes).collect();
    ProductQuantizer::new(dim, part_count, books).ok().map(|books| Codec::Product(Arc::new(books)))
}

/// What was decoded is encoded or refused.
fn recode(codec: &Codec, rows: &[f32], dim: usize) {
    let mut code = vec![0; codec.code_bytes(dim)];
    for row in rows.chunks_exact(dim).take(4) {
        let is_coded = codec.encode(row, &mut code).is_ok();
        let is_finite = row.iter().all(|value| value.is_finite());
        assert!(is_finite || !is_coded || matches!(codec, Codec::F32), "{}", codec.name());
    }
}

/// Bits to compare; all NaNs are one, since their payload is not part of the promise.
fn bits(numbers: &[f32]) -> Vec<u32> {
    let one_nan = |value: &f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    numbers.iter().map(one_nan).collect()
}
