use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dynamo_kv_router::indexer::{KvIndexerMetrics, LocalKvIndexer};
use dynamo_kv_router::protocols as dynamo;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::{Admission, Control, Follower, Settings};
use crate::feed::test_ports::free_ports;
use crate::feed::zmq::{EngineFeed, PublisherFeed, Timing};
use crate::feed::{Answer, Limits};
use crate::feed::{FeedId, Frame, LocalIndexers, Origin, RecoverError, Signal, Source, Tap};
use crate::ids::{BlockSize, DpRank, WorkerId, WorkerRank};
use crate::index::{Held, Index};
use crate::ingest::{self, Link};
use crate::trust::Trust;
use crate::wire::normalize::Dialect;

const OF: WorkerRank = WorkerRank::new(7, 0);
/// Against hanging; no test expects it to pass.
const FOREVER: Duration = Duration::from_secs(30);
const QUICK: Timing = Timing {
    connect: Duration::from_secs(2),
    first_wait: Duration::from_millis(10),
    last_wait: Duration::from_millis(50),
    silence: Duration::from_millis(200),
    replay: Duration::from_secs(1),
};

fn settings() -> Settings {
    Settings {
        tick: Duration::from_millis(10),
        recovery: ingest::Limits {
            retry_first: Duration::from_millis(20),
            retry_most: Duration::from_millis(100),
            probe_after: Some(Duration::from_millis(100)),
            ..ingest::Limits::default()
        },
        ..Settings::default()
    }
}

/// An index that follows something, until it is dropped.
struct Following {
    index: Arc<Index>,
    control: Control,
    task: JoinHandle<()>,
}

impl Following {
    fn start(settings: Settings) -> Self {
        let index = Arc::new(Index::new(BlockSize::try_from(4).unwrap()));
        let (follower, control) = Follower::new(Arc::clone(&index), settings);
        let task = tokio::spawn(follower.run());
        Self {
            index,
            control,
            task,
        }
    }

    async fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let waiting = async {
            while !is_so(self) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(FOREVER, waiting).await.is_err() {
            let standings = self.control.trust().standings(self.control.now());
            panic!("{what}: {standings:?}, {:?}", self.index.held(OF));
        }
    }

    fn trust(&self) -> Option<Trust> {
        let standing = self.control.trust().standing(OF, self.control.now());
        standing.map(|standing| standing.trust)
    }

    /// Waits until the rank is complete and holds blocks with these engine's hashes.
    async fn holds(&self, engine: &[u64]) -> Vec<Held> {
        self.until("complete, with the blocks", |following| {
            let held = following.index.held(OF);
            let mut names: Vec<u64> = held.iter().map(|held| held.engine.0).collect();
            names.sort_unstable();
            names == engine && following.trust() == Some(Trust::Complete)
        })
        .await;
        self.index.held(OF)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An engine's publisher with its replay socket, as far as they matter here.
struct Engine {
    publisher: PubSocket,
    kept: Arc<Mutex<Vec<(u64, Bytes)>>>,
    replays: JoinHandle<()>,
}

impl Engine {
    async fn start(ports: [u16; 2]) -> Self {
        let mut publisher = PubSocket::new();
        let mut router = RouterSocket::new();
        let [publish, replay] = ports.map(|port| format!("tcp://127.0.0.1:{port}"));
        // The ports of the engine before may take a moment to be free.
        while publisher.bind(&publish).await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
        while router.bind(&replay).await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
        let kept = Arc::new(Mutex::new(Vec::<(u64, Bytes)>::new()));
        let of_replays = Arc::clone(&kept);
        let replays = tokio::spawn(async move {
            while let Ok(request) = router.recv().await {
                let from: [u8; 8] = request.get(2).unwrap().as_ref().try_into().unwrap();
                let mut answer = of_replays.lock().clone();
                answer.retain(|(seq, _)| *seq >= u64::from_be_bytes(from));
                answer.push((u64::MAX, Bytes::new()));
                for (seq, batch) in answer {
                    let mut reply = ZmqMessage::from(request.get(0).unwrap().clone());
                    for frame in [
                        Bytes::new(),
                        Bytes::new(),
                        seq.to_be_bytes().to_vec().into(),
                    ] {
                        reply.push_back(frame);
                    }
                    reply.push_back(batch);
                    // Who asks may be gone already.
                    let _ = router.send(reply).await;
                }
            }
        });
        Self {
            publisher,
            kept,
            replays,
        }
    }

    /// Does something whose event never reaches a socket.
    fn unheard(&self, events: Value) -> (u64, Bytes) {
        let mut kept = self.kept.lock();
        let seq = kept.len() as u64;
        let batch = rmp_serde::to_vec(&(seq as f64, events, 0)).unwrap();
        kept.push((seq, batch.into()));
        kept.last().unwrap().clone()
    }

    async fn publish(&mut self, events: Value) {
        let (seq, batch) = self.unheard(events);
        let mut message = ZmqMessage::from(Bytes::new());
        message.push_back(seq.to_be_bytes().to_vec().into());
        message.push_back(batch);
        self.publisher.send(message).await.unwrap();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.replays.abort();
    }
}

fn stored(engine: u64, parent: Option<u64>) -> Value {
    let tokens: Vec<u64> = (0..4).map(|token| engine * 4 + token).collect();
    json!({"type": "BlockStored", "block_hashes": [engine], "parent_block_hash": parent,
        "token_ids": tokens, "block_size": 4, "medium": "GPU"})
}

fn removed(engine: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [engine], "medium": "GPU"})
}

fn engine_feed(ports: [u16; 2], replays: bool) -> Arc<dyn Source> {
    let [publisher, replay] = ports.map(|port| format!("tcp://127.0.0.1:{port}"));
    let replay = replays.then_some(replay.as_str());
    Arc::new(EngineFeed::new(OF, Dialect::Vllm, 0, &publisher, replay, "", QUICK).unwrap())
}

#[tokio::test]
async fn an_engine_is_followed_through_late_start_loss_and_restart() {
    let ports = free_ports();
    let live = Following::start(settings());
    live.control
        .follow(engine_feed(ports, true), Admission::Named);
    let mut engine = Engine::start(ports).await;
    // Before the subscription, most likely.
    engine
        .publish(json!([stored(1, None), stored(2, Some(1))]))
        .await;
    live.holds(&[1, 2]).await;

    engine.publish(json!([stored(3, Some(2))])).await;
    live.holds(&[1, 2, 3]).await;

    // A gap, which the next message shows.
    engine.unheard(json!([removed(3), stored(4, Some(2))]));
    engine.publish(json!([stored(5, Some(4))])).await;
    let by_events = live.holds(&[1, 2, 4, 5]).await;

    // Whoever comes now learns the same from the replay alone.
    let late = Following::start(settings());
    late.control
        .follow(engine_feed(ports, true), Admission::Named);
    assert_eq!(late.holds(&[1, 2, 4, 5]).await, by_events);

    // A gap that no message shows.
    engine.unheard(json!([removed(5)]));
    live.holds(&[1, 2, 4]).await;

    engine
        .publish(json!([{"type": "AllBlocksCleared"}, stored(8, None)]))
        .await;
    live.holds(&[8]).await;

    // Started again, further along than before, with other content.
    drop(engine);
    live.until("not complete", |live| live.trust() != Some(Trust::Complete))
        .await;
    let mut engine = Engine::start(ports).await;
    for block in 20..29 {
        engine.unheard(json!([stored(block, None)]));
    }
    engine.publish(json!([stored(29, None)])).await;
    let expected: Vec<u64> = (20..30).collect();
    let by_events = live.holds(&expected).await;
    assert_eq!(late.holds(&expected).await, by_events);

    live.control.remove(OF.worker).await;
    assert!(live.index.held(OF).is_empty());
    assert_eq!(live.trust(), None);
}

#[tokio::test]
async fn without_a_replay_a_late_start_is_never_complete_until_the_cache_is_cleared() {
    let ports = free_ports();
    let mut engine = Engine::start(ports).await;
    engine.unheard(json!([stored(1, None)]));
    let live = Following::start(settings());
    live.control
        .follow(engine_feed(ports, false), Admission::Named);
    let mut block = 2;
    while live.index.held(OF).is_empty() {
        engine.publish(json!([stored(block, None)])).await;
        block += 1;
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(live.trust(), Some(Trust::MayHaveHoles));
    engine
        .publish(json!([{"type": "AllBlocksCleared"}, stored(900, None)]))
        .await;
    live.holds(&[900]).await;
}

/// A feed that says what a test tells it.
struct Scripted {
    signals: Mutex<Vec<Signal>>,
    origin: Origin,
}

impl Source for Scripted {
    fn name(&self) -> String {
        "script".to_owned()
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn link(&self) -> Link {
        Link::DYNAMO_EVENTS_ONLY
    }

    fn listen(&self, mut tap: Tap) -> BoxFuture<'_, ()> {
        let signals = std::mem::take(&mut *self.signals.lock());
        Box::pin(async move {
            for signal in signals {
                match signal {
                    Signal::Frame(frame) => tap.offer(frame),
                    other => assert!(tap.tell(other).await),
                }
            }
            tap.closed().await;
        })
    }

    fn replay(&self, of: WorkerRank, _: u64) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        self.dump(of)
    }

    fn dump(&self, of: WorkerRank) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(async move { Err(RecoverError::NotOffered { of, what: "dump" }) })
    }
}

fn event(of: WorkerRank, id: u64, data: dynamo::KvCacheEventData) -> dynamo::RouterEvent {
    let event = dynamo::KvCacheEvent {
        event_id: id,
        data,
        dp_rank: of.rank.0,
    };
    dynamo::RouterEvent::new(of.worker.0, event)
}

fn store(engine: u64, parent: Option<u64>) -> dynamo::KvCacheEventData {
    dynamo::KvCacheEventData::Stored(dynamo::KvCacheStoreData {
        parent_hash: parent.map(dynamo::ExternalSequenceBlockHash),
        start_position: None,
        blocks: vec![dynamo::KvCacheStoredBlockData {
            block_hash: dynamo::ExternalSequenceBlockHash(engine),
            tokens_hash: dynamo::LocalBlockHash(engine + 1000),
            mm_extra_info: None,
        }],
    })
}

/// As `dynamo-runtime` puts it on the wire.
fn envelope(sequence: u64, events: &[dynamo::RouterEvent]) -> Bytes {
    #[derive(Serialize)]
    struct Envelope<'a> {
        publisher_id: u64,
        sequence: u64,
        published_at: u64,
        topic: &'a str,
        #[serde(serialize_with = "bytes")]
        payload: Vec<u8>,
    }
    fn bytes<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }
    let envelope = Envelope {
        publisher_id: 42,
        sequence,
        published_at: 0,
        topic: "kv-events",
        payload: rmp_serde::to_vec_named(events).unwrap(),
    };
    rmp_serde::to_vec_named(&envelope).unwrap().into()
}

fn frame(envelope: Bytes) -> Signal {
    Signal::Frame(Frame::Dynamo { envelope })
}

#[tokio::test]
async fn a_shared_feed_lets_in_whom_it_hears_of_but_nobody_who_was_removed() {
    let [first, second, removed] = [1, 2, 3].map(|worker| WorkerRank::new(worker, 0));
    let events = [first, second, removed].map(|of| event(of, 0, store(5, None)));
    let mut broken = envelope(1, &[event(first, 1, store(6, Some(5)))]).to_vec();
    broken.truncate(20);
    let script = |admission| {
        let following = Following::start(Settings {
            heard_ranks: 2,
            ..settings()
        });
        let source = Arc::new(Scripted {
            signals: Mutex::new(vec![
                Signal::Connected,
                frame(Bytes::from_static(b"\xc1")),
                frame(broken.clone().into()),
                frame(envelope(0, &events)),
                frame(envelope(1, &[event(first, 1, store(6, Some(5)))])),
            ]),
            origin: Origin::All,
        });
        // Commands go before frames.
        let control = following.control.clone();
        tokio::spawn(async move { control.remove(removed.worker).await });
        following.control.follow(source, admission);
        following
    };
    let heard = script(Admission::Heard);
    heard
        .until("all heard", |heard| heard.index.held(first).len() == 2)
        .await;
    assert_eq!(heard.index.held(second).len(), 1);
    assert_eq!(heard.index.ranks().len(), 2);
    assert!(heard.index.held(removed).is_empty());

    let named = script(Admission::Named);
    named.control.admit(second.worker, vec![second.rank]);
    named
        .until("read", |named| named.control.queue().queued() == 4)
        .await;
    assert!(named.index.held(first).is_empty());
}

#[tokio::test]
async fn an_overflow_lowers_the_ranks_of_its_feed_alone() {
    let following = Following::start(settings());
    let script = |of, signals| {
        Arc::new(Scripted {
            signals: Mutex::new(signals),
            origin: Origin::Rank(of),
        })
    };
    let other = WorkerRank::new(8, 0);
    let cleared = |of| event(of, 0, dynamo::KvCacheEventData::Cleared);
    let signals = |of| vec![Signal::Connected, frame(envelope(0, &[cleared(of)]))];
    let mut overflowing = signals(OF);
    overflowing.push(Signal::Dropped { frames: 3 });
    following
        .control
        .follow(script(OF, overflowing), Admission::Named);
    following
        .control
        .follow(script(other, signals(other)), Admission::Named);
    let trust = |following: &Following, of| {
        let standing = following
            .control
            .trust()
            .standing(of, following.control.now());
        standing.map(|standing| standing.trust)
    };
    following
        .until("lowered and complete", |following| {
            trust(following, OF) == Some(Trust::MayHaveHoles)
                && trust(following, other) == Some(Trust::Complete)
        })
        .await;
}

/// Between the two nobody listened.
#[tokio::test]
async fn a_source_that_takes_the_place_of_another_does_not_inherit_its_trust() {
    let following = Following::start(settings());
    let script = |signals| {
        Arc::new(Scripted {
            signals: Mutex::new(signals),
            origin: Origin::Rank(OF),
        })
    };
    let cleared = event(OF, 0, dynamo::KvCacheEventData::Cleared);
    let first = vec![Signal::Connected, frame(envelope(0, &[cleared]))];
    following.control.follow(script(first), Admission::Named);
    following
        .until("complete", |following| {
            following.trust() == Some(Trust::Complete)
        })
        .await;
    let second = vec![Signal::Connected];
    following.control.follow(script(second), Admission::Named);
    following
        .until("lowered", |following| {
            following.trust() == Some(Trust::MayHaveHoles)
        })
        .await;
}

/// Dynamo's own local indexer.
struct Local(Arc<LocalKvIndexer>);

impl LocalIndexers for Local {
    fn ask(
        &self,
        _of: WorkerRank,
        from_event: Option<u64>,
    ) -> BoxFuture<'_, Result<Bytes, RecoverError>> {
        Box::pin(async move {
            let answer = self.0.get_events_in_id_range(from_event, None).await;
            Ok(rmp_serde::to_vec_named(&answer).unwrap().into())
        })
    }
}

/// A publisher of Dynamo's event plane over ZMQ.
struct DynamoWorker {
    publisher: PubSocket,
    local: Arc<LocalKvIndexer>,
    next: u64,
}

impl DynamoWorker {
    async fn start(port: u16, buffer: usize) -> Self {
        let mut publisher = PubSocket::new();
        let at = format!("tcp://127.0.0.1:{port}");
        publisher.bind(&at).await.unwrap();
        let metrics = Arc::new(KvIndexerMetrics::new_unregistered());
        let local = LocalKvIndexer::new(Default::default(), 4, metrics, buffer);
        Self {
            publisher,
            local: Arc::new(local),
            next: 1,
        }
    }

    async fn unheard(&mut self, data: dynamo::KvCacheEventData) -> dynamo::RouterEvent {
        let event = event(OF, self.next, data);
        self.next += 1;
        self.local
            .apply_event_with_buffer(event.clone())
            .await
            .unwrap();
        event
    }

    /// Publishes what changes nothing until it arrives: a publisher does not say from when on it sends to
    /// a new subscriber.
    async fn is_heard_by(&mut self, following: &Following) {
        let last_seq = || {
            let now = following.control.now();
            let standing = following.control.trust().standing(OF, now);
            standing.and_then(|standing| standing.last_seq)
        };
        let dumped = last_seq();
        while last_seq() == dumped {
            self.publish(remove(999)).await;
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn publish(&mut self, data: dynamo::KvCacheEventData) {
        let event = self.unheard(data).await;
        let envelope = envelope(self.next, &[event]);
        let mut body = vec![1];
        body.extend(u32::try_from(envelope.len()).unwrap().to_be_bytes());
        body.extend(envelope);
        let mut message = ZmqMessage::from(Bytes::from_static(b"kv-events"));
        for frame in [
            42_u64.to_be_bytes().to_vec(),
            self.next.to_be_bytes().to_vec(),
            body,
        ] {
            message.push_back(frame.into());
        }
        self.publisher.send(message).await.unwrap();
    }
}

fn remove(engine: u64) -> dynamo::KvCacheEventData {
    dynamo::KvCacheEventData::Removed(dynamo::KvCacheRemoveData {
        block_hashes: vec![dynamo::ExternalSequenceBlockHash(engine)],
    })
}

#[tokio::test]
async fn dynamos_events_and_dumps_come_to_the_same() {
    // The buffer of two events makes larger gaps a matter of dumps.
    for buffer in [2, 1000] {
        let [port] = free_ports();
        let mut worker = DynamoWorker::start(port, buffer).await;
        let feed = || -> Arc<dyn Source> {
            let at = format!("tcp://127.0.0.1:{port}");
            let local = Arc::new(Local(Arc::clone(&worker.local)));
            Arc::new(PublisherFeed::new(OF, 42, &at, Some(local), QUICK).unwrap())
        };
        let (live_feed, late_feed) = (feed(), feed());
        worker.unheard(store(1, None)).await;
        worker.unheard(store(2, Some(1))).await;
        worker.unheard(store(3, Some(2))).await;
        let live = Following::start(settings());
        live.control.follow(live_feed, Admission::Named);
        live.until("the start", |live| live.index.held(OF).len() == 3)
            .await;
        worker.is_heard_by(&live).await;
        worker.publish(store(4, Some(3))).await;
        live.holds(&[1, 2, 3, 4]).await;
        for block in [4, 3] {
            worker.unheard(remove(block)).await;
        }
        for block in 5..9 {
            worker.unheard(store(block, Some(2))).await;
        }
        worker.publish(store(9, Some(2))).await;
        let by_events = live.holds(&[1, 2, 5, 6, 7, 8, 9]).await;
        let late = Following::start(settings());
        late.control.follow(late_feed, Admission::Named);
        late.until("the dump", |late| late.index.held(OF) == by_events)
            .await;
        worker.is_heard_by(&late).await;
        worker.publish(dynamo::KvCacheEventData::Cleared).await;
        worker.publish(store(10, None)).await;
        live.holds(&[10]).await;
        late.holds(&[10]).await;
    }
}

#[tokio::test]
async fn a_follower_ends_with_its_last_control() {
    let index = Arc::new(Index::new(BlockSize::try_from(4).unwrap()));
    let (follower, control) = Follower::new(
        index,
        Settings {
            queue: Limits::default(),
            ..settings()
        },
    );
    let port = free_ports();
    control.follow(engine_feed(port, true), Admission::Named);
    control.admit(WorkerId(9), vec![DpRank(0)]);
    let shown = format!("{follower:?} {:?}", FeedId(0));
    assert!(shown.contains("Follower"));
    let running = tokio::spawn(follower.run());
    drop(control);
    timeout(FOREVER, running).await.unwrap().unwrap();
}
