//! ZMQ: the publishers of vLLM and SGLang, one endpoint a rank, and Dynamo's brokerless event plane.
//!
//! The crate `zeromq` connects again by itself, but waits up to 30 s between attempts, has no limit for
//! a peer that accepts and then says nothing, and never notices a peer that is gone without a word, as a
//! lost host is. So every connection is a socket of its own here, made anew when it breaks, and one that
//! is silent is tested. What the crate cannot be kept from: it takes the memory that a message's header
//! announces before the message is there, so publishers must not be strangers.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use thiserror::Error;
use tokio::time::{sleep, timeout};
use zeromq::{
    DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, SubSocket,
    ZmqMessage, ZmqResult,
};

use crate::feed::source::Recovery;
use crate::feed::{Answer, Frame, LocalIndexers, Origin, RecoverError, Signal, Source, Tap};
use crate::ids::WorkerRank;
use crate::ingest::Link;
use crate::wire::normalize::Dialect;

/// `seq` of the message that ends a replay (`vllm/distributed/kv_events.py`, `END_SEQ`).
const END_SEQ: u64 = u64::MAX;

/// Bytes of one replay, at most: what vLLM keeps by default (10,000 batches) of long prompts.
const REPLAY_BYTES: usize = 512 << 20;

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Until a connection stands, handshake included.
    pub connect: Duration,
    /// Before the first attempt to connect again; doubled with every one that fails.
    pub first_wait: Duration,
    /// The longest such wait.
    pub last_wait: Duration,
    /// How long a connection may be silent before it is tested. A publisher has nothing to say while its
    /// engine is idle.
    pub silence: Duration,
    /// How long nothing may come during a replay.
    pub replay: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            first_wait: Duration::from_millis(100),
            last_wait: Duration::from_secs(5),
            silence: Duration::from_secs(10),
            replay: Duration::from_secs(5),
        }
    }
}

/// An endpoint that nothing can connect to.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BadEndpoint {
    /// Not of the form `tcp://host:port`.
    #[error("the endpoint {0:?} is not tcp://host:port")]
    NotTcp(String),
    /// A wildcard, which only a publisher can use.
    #[error("the endpoint {0:?} is where a publisher binds; a subscriber needs its host")]
    Wildcard(String),
    /// The rank's port would be above 65535.
    #[error("the endpoint {endpoint:?} has no port for rank {rank}")]
    NoPort {
        /// The endpoint of rank 0.
        endpoint: String,
        /// The rank.
        rank: u32,
    },
}

/// The endpoint of a rank from that of rank 0: the port is higher by the rank
/// (`ZmqEventPublisher.offset_endpoint_port`, the same in SGLang).
///
/// # Errors
/// See `BadEndpoint`.
pub fn endpoint_of_rank(endpoint: &str, rank: u32) -> Result<String, BadEndpoint> {
    let not_tcp = || BadEndpoint::NotTcp(endpoint.to_owned());
    let address = endpoint.strip_prefix("tcp://").ok_or_else(not_tcp)?;
    let (host, port) = address.rsplit_once(':').ok_or_else(not_tcp)?;
    let port: u16 = port.parse().map_err(|_| not_tcp())?;
    if host.is_empty() {
        return Err(not_tcp());
    }
    if matches!(host, "*" | "0.0.0.0" | "[::]") {
        return Err(BadEndpoint::Wildcard(endpoint.to_owned()));
    }
    let port = u32::from(port).checked_add(rank);
    let port = port.and_then(|port| u16::try_from(port).ok());
    match port {
        Some(port) if port > 0 => Ok(format!("tcp://{host}:{port}")),
        _ => Err(BadEndpoint::NoPort {
            endpoint: endpoint.to_owned(),
            rank,
        }),
    }
}

/// The publisher of one rank of a vLLM or SGLang engine.
#[derive(Clone, Debug)]
pub struct EngineFeed {
    of: WorkerRank,
    dialect: Dialect,
    publisher: String,
    replay: Option<String>,
    topic: String,
    timing: Timing,
}

impl EngineFeed {
    /// The publisher of `of`, at the port of its rank.
    ///
    /// `endpoint`, `replay_endpoint` and `topic` are those of the engine's `kv_events_config`, with the
    /// engine's host in place of a wildcard. `local_rank` counts the ranks of this engine, which choose
    /// the port, while `of` counts over the deployment.
    ///
    /// # Errors
    /// See `BadEndpoint`.
    pub fn new(
        of: WorkerRank,
        dialect: Dialect,
        local_rank: u32,
        endpoint: &str,
        replay_endpoint: Option<&str>,
        topic: &str,
        timing: Timing,
    ) -> Result<Self, BadEndpoint> {
        let replay = replay_endpoint.map(|endpoint| endpoint_of_rank(endpoint, local_rank));
        Ok(Self {
            of,
            dialect,
            publisher: endpoint_of_rank(endpoint, local_rank)?,
            replay: replay.transpose()?,
            topic: topic.to_owned(),
            timing,
        })
    }

    async fn replayed(&self, from_seq: u64) -> Result<Answer, RecoverError> {
        let Some(address) = &self.replay else {
            return Err(RecoverError::NotOffered {
                of: self.of,
                what: "replay",
            });
        };
        let mut got = Got {
            next: from_seq,
            bytes: 0,
            frames: Vec::new(),
        };
        loop {
            let asked = got.next;
            match self.ask(address, &mut got).await? {
                End::Whole => return Ok(Answer::Frames(got.frames)),
                // libzmq's ROUTER drops what is beyond its high-water mark of 1,000 messages.
                End::Cut if got.next > asked => {
                    tracing::debug!(of = %self.of, from_seq = got.next, "replay was cut short");
                }
                End::Cut => return Err(self.timed_out(address)),
            }
        }
    }

    /// One question for what `got` does not have yet.
    async fn ask(&self, address: &str, got: &mut Got) -> Result<End, RecoverError> {
        let unreachable = |error: zeromq::ZmqError| RecoverError::Unreachable {
            of: self.of,
            address: address.to_owned(),
            reason: error.to_string(),
        };
        let mut socket = DealerSocket::with_options(options(self.timing));
        socket.connect(address).await.map_err(unreachable)?;
        // The empty frame is what a REQ socket would send before its request.
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&got.next.to_be_bytes()));
        socket.send(request).await.map_err(unreachable)?;
        let mut is_first = true;
        loop {
            let Ok(received) = timeout(self.timing.replay, socket.recv()).await else {
                return Ok(End::Cut);
            };
            let message = received.map_err(unreachable)?;
            let Some((seq, payload)) = replay_message(&message) else {
                return Err(RecoverError::Refused {
                    of: self.of,
                    reason: format!("{} frames that are no replay", message.len()),
                });
            };
            if seq == END_SEQ && payload.is_empty() {
                return Ok(End::Whole);
            }
            if seq < got.next {
                continue;
            }
            // Only what the engine has forgotten may be missing, and that lies before all others.
            if seq > got.next && !(is_first && got.frames.is_empty()) {
                return Ok(End::Cut);
            }
            is_first = false;
            got.bytes += payload.len();
            if got.bytes > REPLAY_BYTES {
                return Err(RecoverError::TooLarge {
                    of: self.of,
                    limit: REPLAY_BYTES,
                });
            }
            got.next = seq.saturating_add(1);
            got.frames.push(Frame::Engine {
                dialect: self.dialect,
                seq,
                payload,
            });
        }
    }

    fn timed_out(&self, address: &str) -> RecoverError {
        RecoverError::TimedOut {
            of: self.of,
            address: address.to_owned(),
            after: self.timing.replay,
        }
    }
}

impl Source for EngineFeed {
    fn name(&self) -> String {
        format!("{} at {}", self.of, self.publisher)
    }

    fn origin(&self) -> Origin {
        Origin::Rank(self.of)
    }

    fn link(&self) -> Link {
        match self.replay {
            Some(_) => Link::ZMQ_REPLAY,
            None => Link::ZMQ,
        }
    }

    fn listen(&self, tap: Tap) -> BoxFuture<'_, ()> {
        let dialect = self.dialect;
        let read = move |message: &ZmqMessage| engine_frame(dialect, message);
        let (at, topic) = (&self.publisher, &self.topic);
        Box::pin(listen(at, topic, self.timing, read, tap))
    }

    fn replay(
        &self,
        _of: WorkerRank,
        from_seq: u64,
    ) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(self.replayed(from_seq))
    }

    fn dump(&self, of: WorkerRank) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(async move { Err(RecoverError::NotOffered { of, what: "dump" }) })
    }
}

/// One publisher of Dynamo's event plane where that is ZMQ without a broker.
///
/// Discovery tells where it is: an `EventChannel` of the topic `kv-events` with a ZMQ transport, and an
/// `EventSource` that names the worker and rank (`dynamo-llm`, `KvEventSource`).
#[derive(Clone, Debug)]
pub struct PublisherFeed {
    of: WorkerRank,
    publisher: u64,
    endpoint: String,
    timing: Timing,
    recovery: Recovery,
}

/// The topic of Dynamo's KV events (`dynamo-kv-router`, `KV_EVENT_SUBJECT`).
const DYNAMO_TOPIC: &str = "kv-events";

impl PublisherFeed {
    /// The publisher `publisher`, which sends the events of `of` from `endpoint`.
    ///
    /// # Errors
    /// See `BadEndpoint`.
    pub fn new(
        of: WorkerRank,
        publisher: u64,
        endpoint: &str,
        local: Option<Arc<dyn LocalIndexers>>,
        timing: Timing,
    ) -> Result<Self, BadEndpoint> {
        Ok(Self {
            of,
            publisher,
            endpoint: endpoint_of_rank(endpoint, 0)?,
            timing,
            recovery: Recovery(local),
        })
    }
}

impl Source for PublisherFeed {
    fn name(&self) -> String {
        format!("{} at {}", self.of, self.endpoint)
    }

    fn origin(&self) -> Origin {
        Origin::Rank(self.of)
    }

    fn link(&self) -> Link {
        self.recovery.link()
    }

    fn listen(&self, tap: Tap) -> BoxFuture<'_, ()> {
        let publisher = self.publisher;
        let read = move |message: &ZmqMessage| dynamo_frame(publisher, message);
        let at = &self.endpoint;
        Box::pin(listen(at, DYNAMO_TOPIC, self.timing, read, tap))
    }

    fn replay(&self, of: WorkerRank, from_seq: u64) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(self.recovery.ask(of, Some(from_seq), "replay"))
    }

    fn dump(&self, of: WorkerRank) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(self.recovery.ask(of, None, "dump"))
    }
}

/// What a replay has brought so far.
struct Got {
    next: u64,
    bytes: usize,
    frames: Vec<Frame>,
}

/// How the answer to one question ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Whole,
    Cut,
}

fn options(timing: Timing) -> SocketOptions {
    let mut options = SocketOptions::default();
    options.connect_timeout(timing.connect);
    options
}

/// Keeps a connection to `endpoint` until nobody listens any more.
async fn listen(
    endpoint: &str,
    topic: &str,
    timing: Timing,
    read: impl Fn(&ZmqMessage) -> Result<Frame, &'static str> + Send,
    mut tap: Tap,
) {
    let mut wait = timing.first_wait;
    let mut failures: u64 = 0;
    loop {
        let connected = tokio::select! {
            connected = connect(endpoint, topic, timing) => connected,
            () = tap.closed() => return,
        };
        match connected {
            Ok(connection) => {
                tracing::info!(endpoint, topic, "connected to the publisher of KV events");
                (wait, failures) = (timing.first_wait, 0);
                if !tap.tell(Signal::Connected).await {
                    return;
                }
                let ended = hear(endpoint, topic, timing, connection, &read, &mut tap).await;
                tracing::warn!(endpoint, why = ended, "lost the publisher of KV events");
                if !tap.tell(Signal::Disconnected).await {
                    return;
                }
            }
            Err(error) => {
                failures += 1;
                if failures.is_power_of_two() {
                    tracing::warn!(endpoint, %error, failures, "no publisher of KV events");
                }
            }
        }
        // No jitter: every publisher has its own address.
        tokio::select! {
            () = sleep(wait) => wait = (wait * 2).min(timing.last_wait),
            () = tap.closed() => return,
        }
    }
}

/// A socket that has connected, and what happens to its connection.
struct Connection {
    socket: SubSocket,
    events: futures_util::stream::Fuse<futures_util::stream::BoxStream<'static, SocketEvent>>,
}

async fn connect(endpoint: &str, topic: &str, timing: Timing) -> ZmqResult<Connection> {
    let mut socket = SubSocket::with_options(options(timing));
    let events = socket.monitor().boxed().fuse();
    socket.subscribe(topic).await?;
    socket.connect(endpoint).await?;
    Ok(Connection { socket, events })
}

/// Hands on what comes over a connection, and says why it ended.
async fn hear(
    endpoint: &str,
    topic: &str,
    timing: Timing,
    mut connection: Connection,
    read: &impl Fn(&ZmqMessage) -> Result<Frame, &'static str>,
    tap: &mut Tap,
) -> String {
    let mut is_heard = false;
    loop {
        tokio::select! {
            received = connection.socket.recv() => match received {
                Ok(message) => {
                    is_heard = true;
                    match read(&message) {
                        Ok(frame) => tap.offer(frame),
                        Err(why) => tap.malformed(why),
                    }
                }
                Err(error) => return error.to_string(),
            },
            event = connection.events.next() => {
                if matches!(event, None | Some(SocketEvent::Disconnected(_))) {
                    return "closed by the peer".to_owned();
                }
            }
            listened = tap.tell_dropped() => if !listened {
                return "not needed any more".to_owned();
            },
            () = sleep(timing.silence) => {
                // A host that came back knows nothing of this connection and resets it when something
                // is sent; one that is gone takes no second connection.
                let anew = match connection.socket.subscribe(topic).await {
                    Ok(()) => connect(endpoint, topic, timing).await,
                    Err(error) => Err(error),
                };
                match anew {
                    // The crate does not say if a first subscription failed.
                    Ok(anew) if !is_heard => connection = anew,
                    Ok(_) => {}
                    Err(error) => return format!("silent, and {error}"),
                }
                if !tap.tell(Signal::Alive).await {
                    return "not needed any more".to_owned();
                }
            }
        }
    }
}

/// The frames topic, sequence number, batch.
fn engine_frame(dialect: Dialect, message: &ZmqMessage) -> Result<Frame, &'static str> {
    if message.len() != 3 {
        return Err("not three frames");
    }
    let (Some(seq), Some(payload)) = (message.get(1), message.get(2)) else {
        return Err("not three frames");
    };
    Ok(Frame::Engine {
        dialect,
        seq: number(seq).ok_or("a sequence number of other than 8 bytes")?,
        payload: payload.clone(),
    })
}

/// The sequence number and the batch. vLLM sends an empty frame and the topic before them, SGLang and
/// older vLLM only the empty frame.
fn replay_message(message: &ZmqMessage) -> Option<(u64, Bytes)> {
    if !matches!(message.len(), 3 | 4) || !message.get(0)?.is_empty() {
        return None;
    }
    let seq = number(message.get(message.len() - 2)?)?;
    Some((seq, message.get(message.len() - 1)?.clone()))
}

/// The frames topic, publisher, sequence number, and the envelope behind a header of its own: version 1
/// and the envelope's length (`dynamo-runtime`, `event_plane/frame.rs`).
fn dynamo_frame(publisher: u64, message: &ZmqMessage) -> Result<Frame, &'static str> {
    let (Some(from), Some(body), 4) = (message.get(1), message.get(3), message.len()) else {
        return Err("not four frames");
    };
    if number(from) != Some(publisher) {
        return Err("another publisher");
    }
    let Some((header, rest)) = body.split_first_chunk::<5>() else {
        return Err("no header");
    };
    let [version, length @ ..] = *header;
    if version != 1 {
        return Err("a header of another version");
    }
    if usize::try_from(u32::from_be_bytes(length)) != Ok(rest.len()) {
        return Err("another length than the header says");
    }
    Ok(Frame::Dynamo {
        envelope: body.slice(5..),
    })
}

fn number(frame: &Bytes) -> Option<u64> {
    Some(u64::from_be_bytes(frame.as_ref().try_into().ok()?))
}

#[cfg(test)]
mod tests;
