#![doc = include_str!("../README.md")]

mod candidate;
mod choose;
mod claimable;
mod cool_down;
mod cost;
#[cfg(feature = "dynamo")]
pub mod dynamo;
mod error;
mod query;
mod sizes;

pub use candidate::{Candidate, Load, PrefillCandidate, Refusal, Refusals};
pub use choose::{Asked, Choice, NoChoice, Priced, choose, choose_pair};
pub use claimable::{Cached, Claimable, NoClaim, PromptShape, claimable};
pub use cool_down::CoolDown;
pub use cost::{
    BlockCost, BlockTerms, Form, LoadTerm, PairCost, PairTerms, QueueTerm, Rate, Share,
    Surroundings, Weight,
};
pub use error::BadSetting;
pub use query::{Answer, Fleet, Query};
pub use sizes::{Place, Sizes};
