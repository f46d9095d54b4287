//! Arrays that grow without moving, so that readers index them while the writer appends.

use std::sync::OnceLock;

/// Segments that an arena can have.
const SEGMENTS: usize = 1 << 13;

/// An array of cells that are made `SEGMENT` at a time, when they are first needed, and stay where they are.
///
/// Runs of up to 32 cells that are aligned to their size never cross a segment.
#[derive(Debug)]
pub(super) struct Arena<T, const SEGMENT: usize> {
    segments: Box<[OnceLock<Box<[T]>>]>,
}

impl<T: Default, const SEGMENT: usize> Arena<T, SEGMENT> {
    pub(super) fn new() -> Self {
        Self {
            segments: (0..SEGMENTS).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Makes the cell `index`. False: the arena ends before it.
    pub(super) fn reach(&self, index: u32) -> bool {
        let Some(segment) = self.segments.get(index as usize / SEGMENT) else {
            return false;
        };
        segment.get_or_init(|| (0..SEGMENT).map(|_| T::default()).collect());
        true
    }

    /// The cell `index`, if it was made.
    pub(super) fn get(&self, index: u32) -> Option<&T> {
        let segment = self.segments.get(index as usize / SEGMENT)?.get()?;
        segment.get(index as usize % SEGMENT)
    }

    /// The `count` cells from `start`, within one segment; empty if they were never made.
    pub(super) fn run(&self, start: u32, count: usize) -> &[T] {
        let first = start as usize % SEGMENT;
        let segment = self.segments.get(start as usize / SEGMENT);
        let cells = segment.and_then(OnceLock::get);
        let run = cells.and_then(|cells| cells.get(first..first + count));
        run.unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn cells_stay_and_runs_end_with_what_was_made() {
        let arena = Arena::<AtomicU32, 64>::new();
        assert!(arena.get(0).is_none());
        assert!(arena.run(0, 4).is_empty());
        assert!(arena.reach(3));
        arena.get(3).unwrap().store(7, Ordering::Relaxed);
        assert!(arena.reach(64 * 5));
        assert_eq!(arena.run(0, 4)[3].load(Ordering::Relaxed), 7);
        assert!(arena.run(62, 4).is_empty());
        assert!(!arena.reach(u32::MAX));
    }
}
