#![doc = include_str!("../README.md")]

mod ledger;
mod rates;
mod recover;
mod shared;
mod sync;

pub use ledger::{BadEnding, Closed, Ending, Ledger, OfferBlocks, Rank};
pub use rates::{BadRate, MeasuredRate};
pub use recover::{BadRecoverySetting, Choice, Recovery, RecoverySettings, Stale};
pub use shared::Shared;
