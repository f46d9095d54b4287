//! The one trait that every feed implements, and what it says.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use thiserror::Error;

use crate::feed::Tap;
use crate::ids::WorkerRank;
use crate::ingest::Link;
use crate::wire::normalize::Dialect;

/// Whom a signal of a feed is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// One rank: the socket is its own.
    Rank(WorkerRank),
    /// Everyone whose events the feed carries.
    All,
}

/// The bytes of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A batch of an engine's own events, in msgpack.
    Engine {
        /// Which engine speaks.
        dialect: Dialect,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signal {
    /// A connection stands, for the first time or again. What was sent before it is not known.
    Connected,
    /// Nothing came for a while, but the other side is there and the connection stands.
    Alive,
    /// The connection is lost. The feed keeps trying.
    Disconnected,
    /// A message, in the order of its socket.
    Frame(Frame),
    /// Messages that came between the signals before and after this one and were dropped: there was no
    /// room, or they were none of the protocol's.
    Dropped {
        /// How many.
        frames: u64,
    },
}

/// What a replay or a dump brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Messages of an engine, in order and without a hole between them. The
    /// first one may be later than what was asked for: the rest is not kept any more.
    Frames(Vec<Frame>),
    /// The answer of a worker-local indexer of Dynamo (`WorkerKvQueryResponse` of `dynamo-kv-router`), in
    /// msgpack with named fields: events, or a dump that replaces.
    LocalIndexer(Bytes),
}

/// Why a replay or a dump failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// This feed has no such thing.
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
    #[error("{of} answers with {reason}")]
    Refused {
        /// Whose.
        of: WorkerRank,
        /// What it says.
        reason: String,
    },
    /// The answer is larger than allowed.
    #[error("the answer of {of} is larger than {limit} bytes")]
    TooLarge {
        /// Whose.
        of: WorkerRank,
        /// What is allowed.
        limit: usize,
    },
}

/// A source of events.
pub trait Source: Send + Sync {
    /// Its name in logs.
    fn name(&self) -> String;

    /// Whom its signals are about.
    fn origin(&self) -> Origin;

    /// Which order it keeps and what it can be asked for.
    fn link(&self) -> Link;

    /// Says what it hears until the other end of the queue is gone. It never gives up by itself.
    fn listen(&self, tap: Tap) -> BoxFuture<'_, ()>;

    /// Asks for the messages of `of` from `from_seq` on that are still kept.
    fn replay(&self, of: WorkerRank, from_seq: u64) -> BoxFuture<'_, Result<Answer, RecoverError>>;

    /// Asks for all that `of` holds now.
    fn dump(&self, of: WorkerRank) -> BoxFuture<'_, Result<Answer, RecoverError>>;
}

/// Asks the worker-local indexers of Dynamo, which keep a rank's last events and all that it holds.
///
/// The question goes over Dynamo's request plane: the endpoint
/// `worker_kv_query_source_<publisher id in hexadecimal>` of the worker's component takes a
/// `WorkerKvQueryRequest`. Also where that plane is NATS, the worker answers over a connection of its own
/// to an address that the question carries, so that it takes `dynamo-runtime`'s client. Inside Dynamo that
/// is at hand (`dynamo-llm`, `worker_query_transport.rs`); elsewhere the caller brings it.
pub trait LocalIndexers: Send + Sync {
    /// What the local indexer of `of` answers to a question for all events from `from_event` on, or for
    /// all that it holds if that is `None`: a `WorkerKvQueryResponse` in msgpack with named fields.
    fn ask(
        &self,
        of: WorkerRank,
        from_event: Option<u64>,
    ) -> BoxFuture<'_, Result<Bytes, RecoverError>>;
}

/// What the feeds of Dynamo's event plane do about a replay or a dump.
#[derive(Clone)]
pub(crate) struct Recovery(pub(crate) Option<std::sync::Arc<dyn LocalIndexers>>);

impl Recovery {
    pub(crate) fn link(&self) -> Link {
        match self.0 {
            Some(_) => Link::DYNAMO,
            None => Link::DYNAMO_EVENTS_ONLY,
        }
    }

    pub(crate) async fn ask(
        &self,
        of: WorkerRank,
        from_event: Option<u64>,
        what: &'static str,
    ) -> Result<Answer, RecoverError> {
        match &self.0 {
            Some(local) => local.ask(of, from_event).await.map(Answer::LocalIndexer),
            None => Err(RecoverError::NotOffered { of, what }),
        }
    }
}

impl std::fmt::Debug for Recovery {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.0.is_some() {
            "local indexers"
        } else {
            "none"
        };
        out.write_str(kind)
    }
}
