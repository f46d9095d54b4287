// SPDX-License-Identifier: Apache-2.0

//! A fleet in this process whose workers are scripted.

mod ask;
mod deployment;
mod ledger;
mod run;
mod script;
mod trace;
mod worker;

pub(crate) use ask::Ask;
pub(crate) use deployment::{Builder, prompt};
pub(crate) use run::run;
pub(crate) use script::{Gate, Script, Step};
pub(crate) use worker::{Outcome, Spec};
