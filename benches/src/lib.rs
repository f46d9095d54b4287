// SPDX-License-Identifier: Apache-2.0

//! kvdelta's index and those of `dynamo-kv-router` 1.6.1, side by side: the same events and the same
//! prompts in the same run, every answer compared with an oracle before it is timed.

pub mod claim;
pub mod contender;
pub mod data;
pub mod ingest;
pub mod memory;
pub mod oracle;
pub mod page;
pub mod progress;
pub mod query;
pub mod report;
pub mod spread;
pub mod trace;
