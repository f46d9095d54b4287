//! Which prefixes every rank holds, per tier.

pub mod naive;
mod outcome;
mod stub;

pub use outcome::{Applied, Held, Overlap, Refused, Usage};
pub use stub::Index;
