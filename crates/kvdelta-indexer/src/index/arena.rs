//! Arrays that grow without moving, so that readers index them while the writer appends.

use std::sync::OnceLock;

/// Elements per segment. Runs of up to 32 elements never cross a segment, being aligned to their size.
const SEGMENT: usize = 1 << 15;
const SEGMENTS: usize = 1 << 15;

/// An array of cells that are made when they are first needed and stay where they are.
#[derive(Debug)]
pub(super) struct Arena<T> {
    segments: Box<[OnceLock<Box<[T]>>]>,
}

impl<T: Default> Arena<T> {
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

    /// The cell `index`, which `reach` has made.
    pub(super) fn get(&self, index: u32) -> Option<&T> {
        self.segments
            .get(index as usize / SEGMENT)?
            .get()?
            .get(index as usize % SEGMENT)
    }

    /// The `count` cells from `start`, within one segment; empty if they were never made.
    pub(super) fn run(&self, start: u32, count: usize) -> &[T] {
        let first = start as usize % SEGMENT;
        let segment = self
            .segments
            .get(start as usize / SEGMENT)
            .and_then(OnceLock::get);
        segment
            .and_then(|cells| cells.get(first..first + count))
            .unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn cells_stay_and_runs_end_with_what_was_made() {
        let arena = Arena::<AtomicU32>::new();
        assert!(arena.get(0).is_none());
        assert!(arena.run(0, 4).is_empty());
        assert!(arena.reach(3));
        arena.get(3).unwrap().store(7, Ordering::Relaxed);
        let far = u32::try_from(SEGMENT).unwrap() * 5;
        assert!(arena.reach(far));
        assert_eq!(arena.run(0, 4)[3].load(Ordering::Relaxed), 7);
        assert!(!arena.reach(u32::MAX));
    }
}
