//! From frames to the index: order, recovery, and what it means for trust. No sockets and no clock: the
//! caller brings frames and the time, and does what the returned actions ask for.

use std::sync::Arc;
use std::time::Duration;

use crate::event::Event;
use crate::ids::{DpRank, WorkerId, WorkerRank};
use crate::index::Index;
use crate::metrics::Counters;
use crate::stream::{Digest, Order};
use crate::time::Millis;
use crate::trust::{Reason, Transition, TrustBook};

/// How a rank's events come in, and what can be asked for when some are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Which order the transport keeps.
    pub order: Order,
    /// Whether old frames can be asked for by number.
    pub replays: bool,
    /// Whether the whole state can be asked for.
    pub dumps: bool,
}

impl Link {
    /// An engine's ZMQ publisher without a replay socket.
    pub const ZMQ: Self = Self {
        order: Order::Fifo,
        replays: false,
        dumps: false,
    };
    /// An engine's ZMQ publisher with a replay socket.
    pub const ZMQ_REPLAY: Self = Self {
        order: Order::Fifo,
        replays: true,
        dumps: false,
    };
    /// Dynamo's event plane with worker-local indexers: they answer a range with the range or with a dump.
    pub const DYNAMO: Self = Self {
        order: Order::Unordered,
        replays: true,
        dumps: true,
    };
    /// Dynamo's event plane without worker-local indexers.
    pub const DYNAMO_EVENTS_ONLY: Self = Self {
        order: Order::Unordered,
        replays: false,
        dumps: false,
    };
}

/// What one frame told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The rank that the batch itself names; `None`: that of its stream. It may be another one (B14).
    pub rank: Option<DpRank>,
    /// Changes in their order. Their `of` is that of the batch.
    pub events: Vec<Event>,
    /// Why changes may be missing from `events`, if some may be.
    pub flaw: Option<Reason>,
    /// When the engine made it, by the engine's clock.
    pub made: Option<Millis>,
}

/// How a payload becomes a batch. It is decoded when it is applied, since what a block belongs to may depend
/// on its parent in the index.
pub trait Decode {
    /// What the feed brings.
    type Payload;

    /// The payload's content, the same for a live frame and for its replay.
    fn digest(&self, payload: &Self::Payload) -> Digest;

    /// What the payload tells about rank `stream` of a worker, or about the rank that it names itself.
    fn decode(&mut self, stream: WorkerRank, payload: &Self::Payload, index: &Index) -> Batch;

    /// Forgets what was kept for the stream: its engine started again, or is gone.
    fn forget(&mut self, stream: WorkerRank);
}

/// One numbered payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame<P> {
    /// Its number in the stream.
    pub seq: u64,
    /// What it carries.
    pub payload: P,
}

/// Names one request of a recovery; the answer has to carry it, and an answer to an older one is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// What the shell has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask for the frames from `from_seq` on, `from_seq` included. Answer with [`Ingest::replayed`],
    /// [`Ingest::dumped`] or [`Ingest::recovery_failed`].
    Replay {
        /// Whose.
        of: WorkerRank,
        /// The first one wanted.
        from_seq: u64,
        /// To be handed back.
        ticket: Ticket,
    },
    /// Ask for the whole state. Answer with [`Ingest::dumped`] or [`Ingest::recovery_failed`].
    Dump {
        /// Whose.
        of: WorkerRank,
        /// To be handed back.
        ticket: Ticket,
    },
}

/// What a call led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// To be done by the shell.
    pub actions: Vec<Action>,
    /// Changes of trust, to be logged.
    pub transitions: Vec<Transition>,
}

/// Bounds and times of recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Live frames kept per stream while a recovery runs; older ones are dropped and counted.
    pub held_frames: usize,
    /// Wait before the second try of a refresh; doubled for each further one.
    pub retry_first: Duration,
    /// Longest wait between tries.
    pub retry_most: Duration,
    /// A request without an answer for this long has failed.
    pub answer_within: Duration,
    /// An idle stream that can replay is asked for its last frame after this long: it finds a lost last
    /// frame, and is a sign of life. `None`: never.
    pub probe_after: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            held_frames: 4096,
            retry_first: Duration::from_millis(500),
            retry_most: Duration::from_secs(60),
            answer_within: Duration::from_secs(10),
            probe_after: Some(Duration::from_secs(10)),
        }
    }
}

/// Applies the streams of many workers to one index and one book of trust.
#[derive(Debug)]
pub struct Ingest<D: Decode> {
    index: Arc<Index>,
    trust: Arc<TrustBook>,
    counters: Arc<Counters>,
    limits: Limits,
    decode: D,
}

impl<D: Decode> Ingest<D> {
    /// Without workers.
    pub fn new(
        index: Arc<Index>,
        trust: Arc<TrustBook>,
        counters: Arc<Counters>,
        limits: Limits,
        decode: D,
    ) -> Self {
        Self {
            index,
            trust,
            counters,
            limits,
            decode,
        }
    }

    /// Lets the ranks of a worker in, and forgets those of its ranks that are not among them. A rank that is
    /// in already stays as it is: after a known restart, call [`remove`](Self::remove) first.
    pub fn admit(&mut self, worker: WorkerId, ranks: &[(DpRank, Link)], now: Millis) -> Outcome {
        let _ = (worker, ranks, now);
        Outcome::default()
    }

    /// Forgets a worker. When it returns, nothing of it is in the index or the book, and late frames leave
    /// nothing behind.
    pub fn remove(&mut self, worker: WorkerId) {
        let _ = worker;
    }

    /// The stream's connection stands. The first time, and after a break, it asks for what was missed.
    pub fn connected(&mut self, stream: WorkerRank, now: Millis) -> Outcome {
        let _ = (stream, now);
        Outcome::default()
    }

    /// The stream's connection broke.
    pub fn disconnected(&mut self, stream: WorkerRank, now: Millis) -> Outcome {
        let _ = (stream, now);
        Outcome::default()
    }

    /// A sign of life without an event.
    pub fn alive(&mut self, stream: WorkerRank, now: Millis) -> Outcome {
        let _ = (stream, now);
        Outcome::default()
    }

    /// A live frame.
    pub fn frame(&mut self, stream: WorkerRank, frame: Frame<D::Payload>, now: Millis) -> Outcome {
        let _ = (stream, frame, now);
        Outcome::default()
    }

    /// `dropped` live frames of the stream were dropped by a queue that was full.
    pub fn overflowed(&mut self, stream: WorkerRank, dropped: u64, now: Millis) -> Outcome {
        let _ = (stream, dropped, now);
        Outcome::default()
    }

    /// The answer to a replay: all frames that the engine still has from the asked one on, in order. Empty:
    /// it has none.
    pub fn replayed(
        &mut self,
        stream: WorkerRank,
        ticket: Ticket,
        frames: Vec<Frame<D::Payload>>,
        now: Millis,
    ) -> Outcome {
        let _ = (stream, ticket, frames, now);
        Outcome::default()
    }

    /// A dump of all that the rank holds as of frame `last_seq`: it replaces.
    pub fn dumped(
        &mut self,
        stream: WorkerRank,
        ticket: Ticket,
        payloads: Vec<D::Payload>,
        last_seq: u64,
        now: Millis,
    ) -> Outcome {
        let _ = (stream, ticket, payloads, last_seq, now);
        Outcome::default()
    }

    /// The request could not be answered.
    pub fn recovery_failed(&mut self, stream: WorkerRank, ticket: Ticket, now: Millis) -> Outcome {
        let _ = (stream, ticket, now);
        Outcome::default()
    }

    /// Retries, time-outs, probes, silence, stale reports. To be called every few hundred milliseconds.
    pub fn tick(&mut self, now: Millis) -> Outcome {
        let _ = now;
        Outcome::default()
    }
}
