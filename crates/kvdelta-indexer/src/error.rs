//! Errors of the index's own types. What a bad event costs is counted, see `event::Refused` and
//! `wire::Skipped`; it is never an error of the stream.

use thiserror::Error;

/// A block of no tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a block size of 0 tokens; it is at least 1, and must be that of the engine")]
pub struct BadBlockSize;
