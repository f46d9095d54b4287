// SPDX-License-Identifier: Apache-2.0

//! A fleet in this process whose workers are scripted.

mod ask;
mod deployment;
mod engine;
mod ledger;
mod loose;
mod run;
mod script;
mod trace;
mod worker;

pub(crate) use ask::{Answer, Ask, Sent};
pub(crate) use deployment::{Builder, Fleet, prompt};
pub(crate) use engine::{Outcome, Received};
pub(crate) use run::{run, until};
pub(crate) use script::{Gate, Script, Step};
pub(crate) use trace::Trace;
pub(crate) use worker::{Spec, Worker, capability};
