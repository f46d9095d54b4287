//! Which prefixes every rank holds, per tier.

mod arena;
mod contents;
mod naive;
mod names;
mod node;
mod outcome;
mod query;
mod remove;
mod store;
mod tree;

#[cfg(test)]
mod tests;

pub use naive::Naive;
pub use outcome::{Applied, Held, Overlap, Refused, Sharing, Usage};
pub use tree::Index;
