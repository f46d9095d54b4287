//! Feeds to index: hands what feeds say to the ingest, and carries out what that asks for.
//!
//! ```text
//! sockets -> queue (bounded, drops) -> Follower: ingest -> index, trust
//!    ^                                    |
//!    +------- replay, dump <--------------+
//! ```
//! One task drives the ingest; recoveries run beside it, so that frames are taken off the queue meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tracing::Instrument;

use crate::feed::{
    Answer, Counts, Decoder, FeedId, Frame, Heard, Inlet, Limits, Origin, Outlet, Payload,
    RecoverError, Signal, Source, queue,
};
use crate::ids::{DpRank, WorkerId, WorkerRank};
use crate::index::Index;
use crate::ingest::{self, Action, Ingest, Link, Outcome, Ticket};
use crate::metrics::Counters;
use crate::time::Millis;
use crate::trust::{Trust, TrustBook};
use crate::wire::dynamo::{Envelope, RouterEvent, router_events};
use crate::wire::query::LocalAnswer;

/// Bounds and times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Of the queue between sockets and ingest.
    pub queue: Limits,
    /// Of recovery.
    pub recovery: ingest::Limits,
    /// Without a sign of life for so long a rank is silent.
    pub silent_after: Duration,
    /// How often retries, time-outs and silence are looked at.
    pub tick: Duration,
    /// Replays and dumps that run at once; others wait.
    pub recoveries: usize,
    /// Ranks that feeds may let in by themselves (`Admission::Heard`).
    pub heard_ranks: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            queue: Limits::default(),
            recovery: ingest::Limits::default(),
            silent_after: Duration::from_secs(60),
            tick: Duration::from_millis(250),
            recoveries: 16,
            heard_ranks: 16_384,
        }
    }
}

/// Which ranks of a feed with many are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Those that `Control::admit` names, as discovery knows them.
    Named,
    /// Every one that is heard of and was not removed before: for a look at a fleet without its discovery.
    Heard,
}

/// Follows feeds with one task.
pub struct Follower {
    ingest: Ingest<Decoder>,
    settings: Settings,
    clock: Clock,
    inlet: Inlet,
    outlet: Outlet,
    commands: mpsc::UnboundedReceiver<Command>,
    feeds: BTreeMap<FeedId, Feed>,
    /// Who feeds which rank.
    ranks: BTreeMap<WorkerRank, FeedId>,
    removed: BTreeSet<WorkerId>,
    tasks: JoinSet<()>,
    recoveries: JoinSet<Recovered>,
    permits: Arc<Semaphore>,
    next_feed: u64,
    counters: Arc<Counters>,
}

struct Feed {
    source: Arc<dyn Source>,
    admission: Admission,
    is_up: bool,
    task: tokio::task::AbortHandle,
}

struct Recovered {
    of: WorkerRank,
    ticket: Ticket,
    answer: Result<Answer, RecoverError>,
}

enum Command {
    Follow(Arc<dyn Source>, Admission),
    Admit(WorkerId, Vec<DpRank>),
    Remove(WorkerId, oneshot::Sender<()>),
}

/// Steers a `Follower` from elsewhere. When all are gone the follower ends.
#[derive(Clone, Debug)]
pub struct Control {
    commands: mpsc::UnboundedSender<Command>,
    trust: Arc<TrustBook>,
    counters: Arc<Counters>,
    queue: Arc<Counts>,
    clock: Clock,
}

impl Control {
    /// Begins to listen to a source. One of a single rank lets that rank in.
    pub fn follow(&self, source: Arc<dyn Source>, admission: Admission) {
        self.send(Command::Follow(source, admission));
    }

    /// Lets exactly these ranks of a worker in, whose events come by a feed with many
    /// (`Origin::All`). Also after a removal.
    pub fn admit(&self, worker: WorkerId, ranks: Vec<DpRank>) {
        self.send(Command::Admit(worker, ranks));
    }

    /// Forgets a worker and the sources of its ranks. When it returns, no query finds it.
    pub async fn remove(&self, worker: WorkerId) {
        let (done, is_done) = oneshot::channel();
        self.send(Command::Remove(worker, done));
        // A follower that has ended keeps nothing up to date anyway.
        let _ = is_done.await;
    }

    /// How far to believe the index.
    pub fn trust(&self) -> &Arc<TrustBook> {
        &self.trust
    }

    /// What happened so far.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// What went through the queue.
    pub fn queue(&self) -> &Counts {
        &self.queue
    }

    /// The time by the clock that trust goes by.
    pub fn now(&self) -> Millis {
        self.clock.now()
    }

    fn send(&self, command: Command) {
        // As above.
        let _ = self.commands.send(command);
    }
}

impl std::fmt::Debug for Command {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Follow(source, admission) => {
                write!(out, "Follow({}, {admission:?})", source.name())
            }
            Self::Admit(worker, ranks) => write!(out, "Admit({}, {ranks:?})", worker.0),
            Self::Remove(worker, _) => write!(out, "Remove({})", worker.0),
        }
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let feeds: Vec<_> = self.feeds.values().map(|feed| feed.source.name()).collect();
        out.debug_tuple("Follower").field(&feeds).finish()
    }
}

/// The system's time, which no correction of it moves backwards.
#[derive(Clone, Copy, Debug)]
struct Clock {
    began: Instant,
    at: Duration,
}

impl Clock {
    fn start() -> Self {
        Self {
            began: Instant::now(),
            at: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        }
    }

    fn now(&self) -> Millis {
        Millis(0).plus(self.at + self.began.elapsed())
    }
}

impl Follower {
    /// A follower that keeps `index` up to date, without feeds, and what steers it.
    pub fn new(index: Arc<Index>, settings: Settings) -> (Self, Control) {
        let counters = Arc::new(Counters::default());
        let trust = Arc::new(TrustBook::new(settings.silent_after));
        let decoder = Decoder::new(index.block_size(), Arc::clone(&counters));
        let ingest = Ingest::new(
            index,
            Arc::clone(&trust),
            Arc::clone(&counters),
            settings.recovery,
            decoder,
        );
        let (inlet, outlet) = queue(settings.queue);
        let (to, commands) = mpsc::unbounded_channel();
        let clock = Clock::start();
        let control = Control {
            commands: to,
            trust,
            counters: Arc::clone(&counters),
            queue: Arc::clone(outlet.counts()),
            clock,
        };
        let follower = Self {
            ingest,
            settings,
            clock,
            inlet,
            outlet,
            commands,
            feeds: BTreeMap::new(),
            ranks: BTreeMap::new(),
            removed: BTreeSet::new(),
            tasks: JoinSet::new(),
            recoveries: JoinSet::new(),
            permits: Arc::new(Semaphore::new(settings.recoveries.max(1))),
            next_feed: 0,
            counters,
        };
        (follower, control)
    }

    /// Runs until every `Control` is gone. Applying a large answer takes the task for as long.
    pub async fn run(mut self) {
        let mut ticks = interval(self.settings.tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => return,
                },
                _ = ticks.tick() => {
                    let now = self.clock.now();
                    let outcome = self.ingest.tick(now);
                    self.act(outcome);
                }
                Some(ended) = self.recoveries.join_next() => match ended {
                    Ok(recovered) => self.recovered(recovered),
                    // Its ticket runs out.
                    Err(error) => tracing::error!(%error, "a recovery ended without an answer"),
                },
                Some(ended) = self.tasks.join_next() => if let Err(error) = ended
                    && !error.is_cancelled()
                {
                    tracing::error!(%error, "a feed ended");
                },
                Some(heard) = self.outlet.next() => {
                    self.heard(heard);
                    // Commands and ticks need not be looked at for each of many.
                    for _ in 0..255 {
                        match self.outlet.try_next() {
                            Some(heard) => self.heard(heard),
                            None => break,
                        }
                    }
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        let now = self.clock.now();
        match command {
            Command::Follow(source, admission) => {
                let id = FeedId(self.next_feed);
                self.next_feed += 1;
                let tap = self.inlet.tap(id);
                let span = tracing::info_span!("kv_feed", source = source.name());
                let listening = Arc::clone(&source);
                let task = async move { listening.listen(tap).await }.instrument(span);
                let origin = source.origin();
                let feed = Feed {
                    source,
                    admission,
                    is_up: false,
                    task: self.tasks.spawn(task),
                };
                self.feeds.insert(id, feed);
                if let Origin::Rank(of) = origin {
                    if let Some(before) = self.ranks.get(&of).copied() {
                        self.forget_feed(before);
                        let outcome = self.ingest.disconnected(of, now);
                        self.act(outcome);
                    }
                    self.removed.remove(&of.worker);
                    self.ranks.insert(of, id);
                    self.admit(of.worker, now);
                }
            }
            Command::Admit(worker, ranks) => {
                self.removed.remove(&worker);
                let shared = self
                    .feeds
                    .iter()
                    .find(|(_, feed)| feed.source.origin() == Origin::All);
                let Some((id, _)) = shared else {
                    tracing::warn!(
                        worker = worker.0,
                        "no feed carries the events of this worker"
                    );
                    return;
                };
                let id = *id;
                self.ranks.retain(|of, _| of.worker != worker);
                let all = ranks
                    .into_iter()
                    .map(|rank| (WorkerRank { worker, rank }, id));
                self.ranks.extend(all);
                self.admit(worker, now);
            }
            Command::Remove(worker, done) => {
                self.ingest.remove(worker, now);
                self.removed.insert(worker);
                let gone = self.ranks.extract_if(.., |of, _| of.worker == worker);
                let feeds: BTreeSet<FeedId> = gone.map(|(_, id)| id).collect();
                for id in feeds {
                    let feed = self.feeds.get(&id);
                    if feed.is_some_and(|feed| feed.source.origin() != Origin::All) {
                        self.forget_feed(id);
                    }
                }
                tracing::info!(worker = worker.0, "worker removed");
                // Whoever asked may have stopped waiting.
                let _ = done.send(());
            }
        }
    }

    fn forget_feed(&mut self, id: FeedId) {
        if let Some(feed) = self.feeds.remove(&id) {
            feed.task.abort();
        }
    }

    /// Tells the ingest all ranks of a worker.
    fn admit(&mut self, worker: WorkerId, now: Millis) {
        let of_it = self.ranks.iter().filter(|(of, _)| of.worker == worker);
        let mut links: Vec<(DpRank, Link)> = Vec::new();
        let mut up = Vec::new();
        for (of, id) in of_it {
            if let Some(feed) = self.feeds.get(id) {
                links.push((of.rank, feed.source.link()));
                if feed.is_up {
                    up.push(*of);
                }
            }
        }
        let outcome = self.ingest.admit(worker, &links, now);
        self.act(outcome);
        for of in up {
            let outcome = self.ingest.connected(of, now);
            self.act(outcome);
        }
    }

    fn heard(&mut self, heard: Heard) {
        let now = self.clock.now();
        // A feed that was forgotten may have left something in the queue.
        let Some(feed) = self.feeds.get_mut(&heard.from) else {
            return;
        };
        match heard.signal {
            Signal::Frame(Frame::Dynamo { envelope }) => self.envelope(heard.from, &envelope, now),
            Signal::Frame(Frame::Engine {
                dialect,
                seq,
                payload: batch,
            }) => {
                if let Origin::Rank(of) = feed.source.origin() {
                    let payload = Payload::Engine { dialect, batch };
                    let frame = ingest::Frame { seq, payload };
                    let outcome = self.ingest.frame(of, frame, now);
                    self.act(outcome);
                }
            }
            Signal::Connected => {
                feed.is_up = true;
                self.each_rank(heard.from, |ingest, of| ingest.connected(of, now));
            }
            Signal::Alive => self.each_rank(heard.from, |ingest, of| ingest.alive(of, now)),
            Signal::Disconnected => {
                feed.is_up = false;
                self.each_rank(heard.from, |ingest, of| ingest.disconnected(of, now));
            }
            Signal::Dropped { frames } => {
                let frames = usize::try_from(frames).unwrap_or(usize::MAX);
                self.each_rank(heard.from, |ingest, of| ingest.overflowed(of, frames, now));
            }
        }
    }

    fn each_rank(
        &mut self,
        from: FeedId,
        mut tell: impl FnMut(&mut Ingest<Decoder>, WorkerRank) -> Outcome,
    ) {
        let ranks = self.ranks.iter().filter(|(_, id)| **id == from);
        let ranks: Vec<WorkerRank> = ranks.map(|(of, _)| *of).collect();
        for of in ranks {
            let outcome = tell(&mut self.ingest, of);
            self.act(outcome);
        }
    }

    fn envelope(&mut self, from: FeedId, bytes: &[u8], now: Millis) {
        let events = Envelope::decode(bytes).and_then(|envelope| router_events(envelope.payload));
        let events = match events {
            Ok(events) => events,
            Err(error) => {
                // Whose it was shows as a gap in the numbers of a rank's events.
                tracing::debug!(%error, "envelope not read");
                self.counters.skipped("bad_envelope", WorkerRank::new(0, 0));
                return;
            }
        };
        for event in events {
            match event {
                Ok(event) => self.event(from, event, now),
                Err(why) => self.counters.skipped(why.as_label(), WorkerRank::new(0, 0)),
            }
        }
    }

    fn event(&mut self, from: FeedId, event: RouterEvent, now: Millis) {
        let of = event.of;
        if !self.ranks.contains_key(&of) {
            let feed = self.feeds.get(&from);
            let may = feed.is_some_and(|feed| feed.admission == Admission::Heard)
                && !self.removed.contains(&of.worker)
                && self.ranks.len() < self.settings.heard_ranks;
            if may {
                tracing::info!(%of, "a worker that was not known is heard of");
                self.ranks.insert(of, from);
                self.admit(of.worker, now);
            }
        }
        let frame = numbered(event);
        let outcome = self.ingest.frame(of, frame, now);
        self.act(outcome);
    }

    fn act(&mut self, outcome: Outcome) {
        for change in outcome.transitions {
            let (trust, reason) = change.to;
            let reason = reason.map(|reason| reason.as_label());
            let from = change.from.map(|(from, _)| from.as_label());
            let to = trust.as_label();
            if trust == Trust::Complete || change.from.is_none() {
                tracing::info!(of = %change.of, from, to, "trust");
            } else {
                tracing::warn!(of = %change.of, from, to, reason, "trust");
            }
        }
        for action in outcome.actions {
            self.recover(action);
        }
    }

    fn recover(&mut self, action: Action) {
        let (of, ticket, from_seq) = match action {
            Action::Replay {
                of,
                from_seq,
                ticket,
            } => (of, ticket, Some(from_seq)),
            Action::Dump { of, ticket } => (of, ticket, None),
        };
        let feed = self.ranks.get(&of).and_then(|id| self.feeds.get(id));
        let Some(source) = feed.map(|feed| Arc::clone(&feed.source)) else {
            // Its rank is on the way out, and its ticket runs out.
            return;
        };
        let permits = Arc::clone(&self.permits);
        let span = tracing::info_span!("kv_recovery", %of, from_seq);
        let task = async move {
            let _permit = permits.acquire_owned().await;
            let answer = match from_seq {
                Some(from_seq) => source.replay(of, from_seq).await,
                None => source.dump(of).await,
            };
            tracing::debug!(ok = answer.is_ok(), "asked");
            Recovered { of, ticket, answer }
        };
        self.recoveries.spawn(task.instrument(span));
    }

    fn recovered(&mut self, recovered: Recovered) {
        let Recovered { of, ticket, answer } = recovered;
        let now = self.clock.now();
        let outcome = match answer {
            Ok(Answer::Frames(frames)) => {
                let frames = frames.into_iter().filter_map(engine_frame).collect();
                self.ingest.replayed(of, ticket, frames, now)
            }
            Ok(Answer::LocalIndexer(bytes)) => self.local(of, ticket, &bytes, now),
            Err(error) => {
                tracing::warn!(%of, %error, "KV events not recovered");
                self.ingest.recovery_failed(of, ticket, now)
            }
        };
        self.act(outcome);
    }

    fn local(&mut self, of: WorkerRank, ticket: Ticket, bytes: &[u8], now: Millis) -> Outcome {
        let of_it = |events: Vec<RouterEvent>| {
            let events = events.into_iter().filter(move |event| event.of == of);
            events.map(numbered)
        };
        match LocalAnswer::decode(bytes) {
            Ok(LocalAnswer::Events { events, .. }) => {
                let frames = of_it(events).collect();
                self.ingest.replayed(of, ticket, frames, now)
            }
            Ok(LocalAnswer::Dump { events, last_id }) => {
                let payloads = of_it(events).map(|frame| frame.payload).collect();
                self.ingest.dumped(of, ticket, payloads, last_id, now)
            }
            // It counts anew: there is none from that number on.
            Ok(LocalAnswer::TooNew { .. }) => self.ingest.replayed(of, ticket, Vec::new(), now),
            Ok(LocalAnswer::Refused(reason)) => {
                tracing::warn!(%of, reason, "the worker's local indexer gives no answer");
                self.ingest.recovery_failed(of, ticket, now)
            }
            Err(error) => {
                tracing::warn!(%of, %error, "the answer of the worker's local indexer is not read");
                self.ingest.recovery_failed(of, ticket, now)
            }
        }
    }
}

fn engine_frame(frame: Frame) -> Option<ingest::Frame<Payload>> {
    match frame {
        Frame::Engine {
            dialect,
            seq,
            payload: batch,
        } => Some(ingest::Frame {
            seq,
            payload: Payload::Engine { dialect, batch },
        }),
        Frame::Dynamo { .. } => None,
    }
}

fn numbered(event: RouterEvent) -> ingest::Frame<Payload> {
    ingest::Frame {
        seq: event.id,
        payload: Payload::Event(Box::new(event)),
    }
}

#[cfg(test)]
mod tests;
