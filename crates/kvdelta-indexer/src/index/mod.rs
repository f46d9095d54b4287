//! Which prefixes every rank holds, per tier.

mod among;
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

pub use among::{Among, FoundAmong};
pub use naive::Naive;
pub use outcome::{Applied, Held, Overlap, Refused, Sharing, Usage};
pub use tree::Index;
