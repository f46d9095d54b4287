#![doc = include_str!("../README.md")]

mod claim;
mod confirm;
mod ledger;
mod offer;
mod plan;
#[cfg(feature = "python")]
mod python;
mod rates;
mod recover;
mod shared;
mod sync;

pub use claim::{Own, Refusal, believe};
pub use confirm::{BlockRange, Confirmation, Paired, confirm, pair};
pub use ledger::{BadEnding, Closed, Ending, Ledger, OfferBlocks, Rank};
pub use offer::{BadOffer, OfferHead};
pub use plan::{Group, OfferPlan, plan};
pub use rates::{BadRate, MeasuredRate};
pub use recover::{BadRecoverySetting, Choice, Recovery, RecoverySettings, Stale};
pub use shared::Shared;
