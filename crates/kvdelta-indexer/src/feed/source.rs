//! The one trait that every feed implements, and what it says.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use thiserror::Error;

use crate::feed::{Inlet, Tap};
use crate::ids::WorkerRank;

/// Whom a signal of a feed is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// One rank: the socket is its own.
    Rank(WorkerRank),
    /// One publisher of Dynamo's event plane, a rank of a worker under an id that changes when it
    /// starts again.
    Publisher(u64),
    /// Everyone whose events the feed carries.
    All,
}

/// The bytes of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A batch of an engine's own events (vLLM, SGLang), in msgpack.
    Engine {
        /// Whose socket it came from; a rank inside the batch goes before it.
        of: WorkerRank,
        /// The publisher's count of batches, from 0 at its start.
        seq: u64,
        /// The batch.
        payload: Bytes,
    },
    /// An envelope of Dynamo's event plane (`dynamo-runtime`, `transports/event_plane`), in msgpack.
    Dynamo {
        /// The envelope with its payload.
        envelope: Bytes,
    },
}

impl Frame {
    /// What it takes of the queue.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Engine { payload, .. } => payload.len(),
            Self::Dynamo { envelope } => envelope.len(),
        }
    }
}

/// What a feed says.
#[derive(Debug)]
pub enum Signal {
    /// A connection stands, for the first time or again. What was sent before it is not known.
    Connected,
    /// Nothing came for a while, but the other side is there and the connection stands.
    Alive,
    /// The connection is lost. The feed keeps trying.
    Disconnected,
    /// A message, in the order of its socket.
    Live(Frame),
    /// A message that a replay brought, in the order of its sequence.
    Replayed(Frame),
    /// All of a replay was told.
    ReplayEnded,
    /// What the rank holds now, in place of what was known.
    Dumped(Dump),
    /// A replay or a dump failed. What was told of it before is right, but not all.
    RecoveryFailed(RecoverError),
    /// Messages that came here between the signals before and after this one and were dropped, since
    /// the queue was full or they were too large.
    Dropped {
        /// How many.
        frames: u64,
    },
}

/// A snapshot of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// The answer of Dynamo's worker-local indexer, `WorkerKvQueryResponse` of `dynamo-kv-router` as
    /// JSON.
    pub response: Bytes,
}

/// Why a replay or a dump failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RecoverError {
    /// This feed has no such thing, or not for this rank.
    #[error("{of} offers no {what}")]
    NotOffered {
        /// Whose.
        of: WorkerRank,
        /// A replay or a dump.
        what: &'static str,
    },
    /// Nothing came for too long.
    #[error("{of} did not answer at {address} within {after:?}")]
    TimedOut {
        /// Whose.
        of: WorkerRank,
        /// Who was asked.
        address: String,
        /// How long nothing came.
        after: Duration,
    },
    /// The other side cannot be reached, or closed.
    #[error("{of} cannot be asked at {address}: {reason}")]
    Unreachable {
        /// Whose.
        of: WorkerRank,
        /// Who was asked.
        address: String,
        /// What the transport says.
        reason: String,
    },
    /// The answer is none.
    #[error("{of} answers {reason}")]
    Refused {
        /// Whose.
        of: WorkerRank,
        /// What it says.
        reason: String,
    },
    /// One message is larger than the whole queue.
    #[error("a message of {bytes} bytes from {of} does not fit into a queue of {limit} bytes")]
    TooLarge {
        /// Whose.
        of: WorkerRank,
        /// Its size.
        bytes: usize,
        /// `Limits::bytes`.
        limit: usize,
    },
}

/// A source of events.
pub trait Source: Send + Sync {
    /// Its name in logs.
    fn name(&self) -> String;

    /// Whom its live messages are about.
    fn origin(&self) -> Origin;

    /// Whether `of` is one of its ranks.
    fn covers(&self, of: WorkerRank) -> bool;

    /// Says what it hears until the other end of the queue is gone. It never gives up by itself.
    fn listen<'a>(&'a self, tap: Tap) -> BoxFuture<'a, ()>;

    /// Tells the messages of `of` from `from_seq` on that are still kept, as `Signal::Replayed`.
    ///
    /// The first one may be later than `from_seq`: the rest is not kept any more.
    fn replay<'a>(
        &'a self,
        of: WorkerRank,
        from_seq: u64,
        into: &'a Inlet,
    ) -> BoxFuture<'a, Result<(), RecoverError>>;

    /// What `of` holds now.
    fn dump<'a>(&'a self, of: WorkerRank) -> BoxFuture<'a, Result<Dump, RecoverError>>;
}

/// Asks a worker-local indexer of Dynamo for all it holds.
///
/// The question goes over Dynamo's request plane (endpoint `worker_kv_query_source_<publisher id in
/// hexadecimal>` of the worker's component, request `WorkerKvQueryRequest` with no start). Also where
/// that is NATS, the answer comes over a TCP connection that the worker opens to the asker, so that it
/// takes `dynamo-runtime`'s client: inside Dynamo that is at hand, elsewhere the caller brings it.
pub trait DumpSource: Send + Sync {
    /// The whole answer for one rank.
    fn dump<'a>(&'a self, of: WorkerRank) -> BoxFuture<'a, Result<Dump, RecoverError>>;
}

/// For fleets whose workers keep no local indexer, or cannot be asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoDump;

impl DumpSource for NoDump {
    fn dump<'a>(&'a self, of: WorkerRank) -> BoxFuture<'a, Result<Dump, RecoverError>> {
        Box::pin(async move { Err(RecoverError::NotOffered { of, what: "dump" }) })
    }
}
