// SPDX-License-Identifier: Apache-2.0

//! A fleet of prefill and decode workers that a trace goes through, routed by the real index and cost.

mod balance;
mod cache;
mod decode;
mod feed;
mod outcome;
mod policy;
mod prefill;
mod router;
mod run;
mod settings;

#[cfg(test)]
mod tests;

pub(crate) use outcome::{Chosen, Outcome, Percentiles};
pub(crate) use policy::Policy;
pub(crate) use run::run;
pub(crate) use settings::Settings;
