#![doc = include_str!("../README.md")]

mod claimable;

pub use claimable::{Cached, Claimable, NoClaim, PromptShape, claimable};
