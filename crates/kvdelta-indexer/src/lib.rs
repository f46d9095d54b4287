#![doc = include_str!("../README.md")]

#[cfg(feature = "dynamo")]
pub mod dynamo;
mod error;
mod event;
#[cfg(feature = "feed")]
pub mod feed;
mod hash;
mod ids;
mod index;
mod ingest;
mod metrics;
mod stream;
mod time;
mod trust;
mod wire;

pub use error::BadBlockSize;
pub use event::{Change, Copies, Event, Source, Stored, StoredBlock};
pub use hash::{MediaHash, Prompt, PromptOf, block_hashes, namespace, next_sequence_hash};
pub use ids::{
    BlockHash, BlockSize, DpRank, EngineHash, Namespace, SequenceHash, Tier, WorkerId, WorkerRank,
};
pub use index::Naive;
pub use index::{Among, Applied, FoundAmong, Held, Index, Overlap, Refused, Sharing, Usage};
pub use ingest::{Action, Batch, Decode, Frame, Ingest, Limits, Link, Outcome, Ticket};
pub use metrics::{Counters, RankCounts, metric_names};
pub use stream::{Cursor, Digest, Observed, Order};
pub use time::Millis;
pub use trust::{Mark, Reason, StaleClaim, Standing, Transition, Trust, TrustBook};
pub use wire::batch::{BadBatch, Place, WireBatch, WireEvent, WireStored};
pub use wire::dynamo::{Envelope, RouterEvent, WireRouterEvent, router_events};
pub use wire::groups::CacheGroups;
pub use wire::normalize::{Dialect, Normalized, Normalizer};
pub use wire::query::LocalAnswer;
pub use wire::skipped::Skipped;
