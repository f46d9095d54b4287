//! What goes into the ingest and what comes out.

use std::time::Duration;

use crate::event::Event;
use crate::ids::WorkerRank;
use crate::index::Index;
use crate::stream::{Digest, Order};
use crate::time::Millis;
use crate::trust::{Reason, Transition};

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Whose cache: the rank that the batch names, else that of its stream.
    pub of: WorkerRank,
    /// Changes in their order, all of that rank.
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

    /// About how many bytes of memory the payload takes.
    fn bytes(&self, payload: &Self::Payload) -> usize;

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
pub struct Ticket(pub(super) u64);

/// What the shell has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask for the frames from `from_seq` on, `from_seq` included. Answer with [`Ingest::replayed`](crate::Ingest::replayed),
    /// [`Ingest::dumped`](crate::Ingest::dumped) or [`Ingest::recovery_failed`](crate::Ingest::recovery_failed).
    Replay {
        /// Whose.
        of: WorkerRank,
        /// The first one wanted.
        from_seq: u64,
        /// To be handed back.
        ticket: Ticket,
    },
    /// Ask for the whole state. Answer with [`Ingest::dumped`](crate::Ingest::dumped) or [`Ingest::recovery_failed`](crate::Ingest::recovery_failed).
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
    /// Bytes of such frames per stream; one frame is kept, however large.
    pub held_bytes: usize,
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
            held_bytes: 64 << 20,
            retry_first: Duration::from_millis(500),
            retry_most: Duration::from_secs(60),
            answer_within: Duration::from_secs(10),
            probe_after: Some(Duration::from_secs(10)),
        }
    }
}
