#![doc = include_str!("../README.md")]

mod claim;
mod confirm;
mod offer;
mod plan;
#[cfg(feature = "python")]
mod python;

pub use claim::{Own, Refusal, believe};
pub use confirm::{BlockRange, Confirmation, Paired, confirm, pair};
pub use offer::{BadOffer, OfferHead};
pub use plan::{Group, OfferPlan, plan};
