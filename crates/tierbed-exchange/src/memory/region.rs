//! Typed access to one rank's region.
//!
//! The compiler cannot see other processes, so exclusive access is a matter of protocol: the
//! layout gives every range of a buffer one writer per epoch, and readers wait for the writer's
//! signal (invariants of the crate). The views here check bounds and alignment, and no more.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use bytemuck::Pod;

use super::map::Map;

/// One rank's part of a map, or a buffer that is sent to another node.
#[derive(Debug, Clone, Copy)]
pub struct Region<'h> {
    start: NonNull<u8>,
    len_bytes: usize,
    _memory: PhantomData<&'h Map>,
}

impl<'h> Region<'h> {
    pub(crate) fn new(map: &'h Map, first_byte: usize, len_bytes: usize) -> Self {
        assert!(first_byte + len_bytes <= map.len_bytes(), "a region lies inside its map");
        Self { start: map.at(first_byte), len_bytes, _memory: PhantomData }
    }

    /// Takes `bytes`, which nobody else sees while the region lives.
    pub(crate) fn over(bytes: &'h mut [u8]) -> Self {
        let len_bytes = bytes.len();
        Self { start: NonNull::from(bytes).cast(), len_bytes, _memory: PhantomData }
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the address of byte `at`, for callers that hand views to another language.
    ///
    /// # Panics
    /// When `count` values of `T` from `at` on are not inside, or not aligned.
    #[must_use]
    pub fn address<T>(&self, at: usize, count: usize) -> usize {
        self.place::<T>(at, count).as_ptr() as usize
    }

    /// Returns the shared word at byte `at`.
    ///
    /// # Panics
    /// When it is outside or not aligned.
    #[must_use]
    pub fn word(&self, at: usize) -> &'h AtomicU32 {
        let place = self.place::<AtomicU32>(at, 1);
        // SAFETY: inside the map, aligned, and alive as long as the map. Words of pads are only
        // touched as atomics.
        unsafe { place.as_ref() }
    }

    /// Returns `count` values from byte `at` on. The caller has seen the signal of their writer
    /// and lets go of them before it gives the signal that lets them be written again.
    ///
    /// # Panics
    /// When they are outside or not aligned.
    #[must_use]
    pub fn read<T: Pod>(&self, at: usize, count: usize) -> &'h [T] {
        let place = self.place::<T>(at, count);
        // SAFETY: inside the map and aligned; any bytes are a `T`; by the protocol no rank writes
        // them until the caller's next signal.
        unsafe { std::slice::from_raw_parts(place.as_ptr(), count) }
    }

    /// Returns the right to write here, by the protocol.
    #[must_use]
    pub fn writer(self) -> Writer<'h> {
        Writer { region: self }
    }

    fn place<T>(&self, at: usize, count: usize) -> NonNull<T> {
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(at));
        assert!(end.is_some_and(|end| end <= self.len_bytes), "a view lies inside its region");
        // SAFETY: `at` is at most the end of the region, as checked.
        let place = unsafe { self.start.add(at) }.cast::<T>();
        assert!(place.is_aligned(), "a view is aligned to its values");
        place
    }
}

/// The right to write ranges of a region that no other rank writes or reads in this epoch.
#[derive(Debug)]
pub struct Writer<'h> {
    region: Region<'h>,
}

impl Writer<'_> {
    /// Returns `count` values from byte `at` on, for writing.
    ///
    /// # Panics
    /// When they are outside or not aligned.
    pub fn values<T: Pod>(&mut self, at: usize, count: usize) -> &mut [T] {
        let place = self.region.place::<T>(at, count);
        // SAFETY: inside the map and aligned; any bytes are a `T`; the layout gives these bytes
        // one writer per epoch, which is the caller, and readers wait for its signal.
        unsafe { std::slice::from_raw_parts_mut(place.as_ptr(), count) }
    }
}
