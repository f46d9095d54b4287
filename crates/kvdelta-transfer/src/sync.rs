//! Where locks come from, so that a model checker can take their place.
//!
//! Unit tests of this crate have shuttle's lock, which works inside `shuttle::check_*` only.

#[cfg(test)]
pub(crate) use shuttle::sync::Mutex;
#[cfg(not(test))]
pub(crate) use std::sync::Mutex;
