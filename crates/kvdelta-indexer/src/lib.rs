//! What every worker's cache holds, as its KV events tell it.
//!
//! Bytes of an event become changes of an index by way of `feed` (frames), `wire` (events), `stream`
//! (order, gaps, restarts), `trust` (how far to believe it) and `index`. All but the feeds is plain data
//! without sockets or clocks.

#[cfg(feature = "dynamo")]
pub mod dynamo;
mod error;
mod event;
mod hash;
mod ids;
mod index;

pub use error::BadBlockSize;
pub use event::{Change, Copies, Event, Source, Stored, StoredBlock};
pub use hash::{MediaHash, Prompt, PromptOf, block_hashes, namespace, next_sequence_hash};
pub use ids::{
    BlockHash, BlockSize, DpRank, EngineHash, Namespace, SequenceHash, Tier, WorkerId, WorkerRank,
};
pub use index::Naive;
pub use index::{Applied, Held, Index, Overlap, Refused, Usage};
