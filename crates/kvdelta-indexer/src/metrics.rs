//! All counts of this crate and their names.

/// What happened so far.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Counters {}
