// SPDX-License-Identifier: Apache-2.0

//! Claims on a mock fleet: Dynamo's whole frontend, patched, over its own planes, with workers that
//! do what a test tells them and no engine. `cargo xtask test --only "mock fleet"` runs it.

#![cfg(kvdelta_patched)]

mod events;
mod fleet;
mod herd;
mod leaving;
mod mixed;
mod parts;
mod paths;
mod query;
mod races;
mod saying;
mod scene;
mod stale;
