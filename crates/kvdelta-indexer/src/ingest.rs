//! From frames to the index: order, recovery, and what it means for trust. No sockets and no clock: the
//! caller brings frames and the time, and does what the returned actions ask for.
//!
//! A stream that misses something holds its live frames back, asks once, applies the answer and then the
//! held frames. A replay is asked from the last applied frame on, that frame included: if its content is the
//! one that was applied, the engine is the same and the rest is added; if not, the engine started again
//! unseen, and what is known is replaced. A dump always replaces.

#[cfg(test)]
mod model;
#[cfg(test)]
mod random;
mod source;
#[cfg(test)]
mod tests;
mod types;

use std::sync::Arc;

use rustc_hash::FxHashMap;

pub use types::{Action, Batch, Decode, Frame, Limits, Link, Outcome, Ticket};

use crate::event::{Change, Event};
use crate::ids::{DpRank, EngineHash, Tier, WorkerId, WorkerRank};
use crate::index::{Index, Refused};
use crate::metrics::{Counters, Dropped, Recovered};
use crate::stream::{Observed, Order};
use crate::time::Millis;
use crate::trust::{Reason, StaleClaim, TrustBook};

use source::{Need, Sent, Source};

/// Applies the streams of many workers to one index and one book of trust. One thread drives it; queries go
/// to the index and the book, which are shared.
#[derive(Debug)]
pub struct Ingest<D: Decode> {
    streams: FxHashMap<WorkerRank, Source<D::Payload>>,
    room: Room<D>,
}

/// All but the streams, so that one stream and the rest can be borrowed at once.
#[derive(Debug)]
struct Room<D> {
    index: Arc<Index>,
    trust: Arc<TrustBook>,
    counters: Arc<Counters>,
    limits: Limits,
    decode: D,
    ranks: FxHashMap<WorkerRank, Rank>,
    tickets: u64,
}

#[derive(Debug)]
struct Rank {
    /// The stream that tells of it.
    stream: WorkerRank,
    heard: bool,
    fed_twice: bool,
    flaw: Option<Reason>,
    /// The stale report that was compared with the index.
    compared: Option<(StaleClaim, Millis)>,
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
            streams: FxHashMap::default(),
            room: Room {
                index,
                trust,
                counters,
                limits,
                decode,
                ranks: FxHashMap::default(),
                tickets: 0,
            },
        }
    }

    /// Lets the ranks of a worker in, and forgets those of its ranks that are not among them. A rank that is
    /// in already stays as it is: after a known restart, call [`remove`](Self::remove) first.
    pub fn admit(&mut self, worker: WorkerId, ranks: &[(DpRank, Link)], now: Millis) -> Outcome {
        let mut out = Outcome::default();
        let gone: Vec<_> = self.streams_of(worker);
        for of in gone {
            if !ranks.iter().any(|(rank, _)| *rank == of.rank) {
                self.forget(of, now);
            }
        }
        for (rank, link) in ranks {
            let of = WorkerRank {
                worker,
                rank: *rank,
            };
            if self.streams.contains_key(&of) {
                continue;
            }
            self.streams.insert(of, Source::new(of, *link, now));
            self.room.ranks.insert(of, Rank::new(of));
            self.room.index.admit(of);
            out.transitions.extend(self.room.trust.admit(of, now));
        }
        out
    }

    /// Forgets a worker. When it returns, nothing of it is in the index or the book, and late frames leave
    /// nothing behind.
    pub fn remove(&mut self, worker: WorkerId, now: Millis) {
        for of in self.streams_of(worker) {
            self.forget(of, now);
        }
    }

    /// The stream's connection stands. The first time, and after a break, it asks for what was missed.
    pub fn connected(&mut self, stream: WorkerRank, now: Millis) -> Outcome {
        self.with(stream, now, |room, source, out| {
            if source.up != Some(true) {
                room.back_up(source);
            }
            room.alive(source, now, out);
        })
    }

    /// The stream's connection broke. Held frames are given up: what comes later may be of another engine.
    pub fn disconnected(&mut self, stream: WorkerRank, now: Millis) -> Outcome {
        self.with(stream, now, |room, source, _| {
            source.up = Some(false);
            source.sent = None;
            let held = source.held.take();
            let given_up = held.map_or(0, |held| held.frames.len());
            room.counters.dropped(Dropped::Disconnected, given_up);
            if source.recovers() {
                source.want = source.want.max(Some(Need::Rest));
            } else {
                room.lose(source, Reason::Disconnected);
            }
        })
    }

    /// A sign of life without an event.
    pub fn alive(&mut self, stream: WorkerRank, now: Millis) -> Outcome {
        self.with(stream, now, |room, source, out| {
            room.alive(source, now, out);
        })
    }

    /// A live frame.
    pub fn frame(&mut self, stream: WorkerRank, frame: Frame<D::Payload>, now: Millis) -> Outcome {
        let mut out = Outcome::default();
        let Some(source) = self.streams.get_mut(&stream) else {
            self.room.counters.dropped(Dropped::NotAdmitted, 1);
            return out;
        };
        match source.up {
            Some(true) => {}
            Some(false) => self.room.back_up(source),
            None => source.up = Some(true),
        }
        if self.room.live(source, frame, now, &mut out) {
            self.room.ask(source, now, &mut out);
            self.room.publish(source, now, &mut out);
        }
        out
    }

    /// `dropped` live frames of the stream were dropped by a queue that was full.
    pub fn overflowed(&mut self, stream: WorkerRank, dropped: usize, now: Millis) -> Outcome {
        self.with(stream, now, |room, source, _| {
            room.counters.dropped(Dropped::FeedQueue, dropped);
            if source.recovers() {
                source.want = source.want.max(Some(Need::Rest));
                if let (Some(_), Some(held)) = (&source.sent, &mut source.held) {
                    held.lost = true;
                }
            } else {
                room.lose(source, Reason::Overflow);
            }
        })
    }

    /// The answer to a replay: all frames that the engine still has from the asked one on, in order. Empty:
    /// it has none, which is also the answer of an engine that has not come that far.
    pub fn replayed(
        &mut self,
        stream: WorkerRank,
        ticket: Ticket,
        frames: Vec<Frame<D::Payload>>,
        now: Millis,
    ) -> Outcome {
        self.with(stream, now, |room, source, out| {
            let Some(sent) = room.answered(source, ticket) else {
                return;
            };
            room.alive(source, now, out);
            let in_order = frames
                .windows(2)
                .all(|pair| pair[0].seq.checked_add(1) == Some(pair[1].seq));
            if !in_order {
                room.fail(source, now, out);
                return;
            }
            match sent.need {
                Need::Probe | Need::Rest => room.rest(source, &sent, frames, now, out),
                Need::Full => room.replace(source, &sent, frames, now, out),
            }
        })
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
        self.with(stream, now, |room, source, out| {
            let Some(sent) = room.answered(source, ticket) else {
                return;
            };
            room.alive(source, now, out);
            room.wipe(source);
            room.set_loss(source, None);
            for payload in &payloads {
                room.apply(source, last_seq, payload, Told::All, now, out);
            }
            let held = source.held.iter().flat_map(|held| &held.frames);
            let oldest = held.map(|frame| frame.seq).min();
            source.cursor.jump(last_seq, oldest, now);
            room.counters.recovered(Recovered::Replaced);
            room.settle(&sent, now, out);
            room.finish(source, now, out);
        })
    }

    /// The request could not be answered.
    pub fn recovery_failed(&mut self, stream: WorkerRank, ticket: Ticket, now: Millis) -> Outcome {
        self.with(stream, now, |room, source, out| {
            if room.answered(source, ticket).is_some() {
                room.fail(source, now, out);
            }
        })
    }

    /// Retries, time-outs, probes, silence, stale reports. To be called every few hundred milliseconds.
    pub fn tick(&mut self, now: Millis) -> Outcome {
        let mut out = Outcome::default();
        for source in self.streams.values_mut() {
            let room = &mut self.room;
            let limits = room.limits;
            if let Some(sent) = &source.sent
                && now.since(sent.at) >= limits.answer_within
            {
                room.fail(source, now, &mut out);
            }
            if let Some(after) = limits.probe_after
                && source.link.replays
                && source.up == Some(true)
                && source.want.is_none()
                && now.since(source.heard) >= after
            {
                source.want = Some(Need::Probe);
            }
            room.compare_stale(source, now, &mut out);
            room.ask(source, now, &mut out);
            room.publish(source, now, &mut out);
        }
        out.transitions.extend(self.room.trust.tick(now));
        out
    }

    fn streams_of(&self, worker: WorkerId) -> Vec<WorkerRank> {
        let all = self.streams.keys().copied();
        all.filter(|of| of.worker == worker).collect()
    }

    fn forget(&mut self, of: WorkerRank, now: Millis) {
        self.streams.remove(&of);
        self.room.ranks.remove(&of);
        self.room.decode.forget(of);
        self.room.trust.remove(of);
        self.room.counters.forget(of);
        self.room.index.remove_rank(of);
        // Ranks that only this stream told of go back to their own, of which nothing is known.
        for (rank, state) in &mut self.room.ranks {
            if state.stream == of {
                *state = Rank::new(*rank);
                self.room.trust.lower(*rank, Reason::NeverHeard, now);
            }
        }
    }

    fn with(
        &mut self,
        stream: WorkerRank,
        now: Millis,
        act: impl FnOnce(&mut Room<D>, &mut Source<D::Payload>, &mut Outcome),
    ) -> Outcome {
        let mut out = Outcome::default();
        if let Some(source) = self.streams.get_mut(&stream) {
            act(&mut self.room, source, &mut out);
            self.room.ask(source, now, &mut out);
            self.room.publish(source, now, &mut out);
        }
        out
    }
}

/// What a frame is applied as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// News: what the index refuses contradicts it.
    New,
    /// Part of all that the engine tells: what the index refuses is not there, which can only say too little.
    All,
}

impl Rank {
    fn new(of: WorkerRank) -> Self {
        Self {
            stream: of,
            heard: false,
            fed_twice: false,
            flaw: Some(Reason::NeverHeard),
            compared: None,
        }
    }
}

impl<D: Decode> Room<D> {
    /// A live frame. `true`: what to ask for, or a rank's flaw, may have changed.
    fn live(
        &mut self,
        source: &mut Source<D::Payload>,
        frame: Frame<D::Payload>,
        now: Millis,
        out: &mut Outcome,
    ) -> bool {
        source.heard = now;
        if source.held.is_some() {
            self.hold(source, frame);
            self.alive(source, now, out);
            return false;
        }
        let content = self.decode.digest(&frame.payload);
        let is_first = source.loss == Some(Reason::NeverHeard);
        let seen = source.cursor.observe(frame.seq, content, now);
        let is_fresh = seen == Observed::Restarted || source.cursor.last().is_none();
        let may_wait = source.recovers() && !source.is_degraded();
        let mut changed = true;
        match seen {
            Observed::Stale => {
                self.counters.dropped(Dropped::Stale, 1);
                self.alive(source, now, out);
                return false;
            }
            Observed::Restarted => self.counters.restarted(),
            Observed::Gap { missing } if !is_first => self.counters.gap(missing),
            Observed::Gap { .. } | Observed::Next => {}
        }
        if is_fresh && frame.seq == 0 && source.link.order == Order::Fifo {
            // The first frame of an engine, whose cache was empty before it.
            self.new_life(source, None);
        } else if seen == Observed::Restarted {
            self.new_life(source, Some(Reason::RestartedUnseen));
            if source.recovers() {
                source.want = Some(Need::Full);
                self.hold(source, frame);
                return true;
            }
        } else if is_first || seen != Observed::Next {
            if may_wait {
                let need = if is_first { Need::Full } else { Need::Rest };
                source.want = source.want.max(Some(need));
                self.hold(source, frame);
                return true;
            }
            let why = if is_first {
                Reason::JoinedLate
            } else {
                Reason::Gap
            };
            self.lose(source, why);
        } else {
            changed = false;
        }
        changed |= self.apply(source, frame.seq, &frame.payload, Told::New, now, out);
        source.cursor.advance(frame.seq, content, now);
        changed
    }

    /// Applies what a frame tells. `true`: a rank's flaw changed.
    fn apply(
        &mut self,
        source: &mut Source<D::Payload>,
        seq: u64,
        payload: &D::Payload,
        told: Told,
        now: Millis,
        out: &mut Outcome,
    ) -> bool {
        let batch = self.decode.decode(source.of, payload, &self.index);
        self.counters.lag(batch.made, now);
        if batch.of.worker != source.of.worker {
            self.lose(source, Reason::Malformed);
            return true;
        }
        let Some(rank) = self.ranks.get_mut(&batch.of) else {
            self.counters.refused(Refused::NotAdmitted, batch.of);
            return false;
        };
        if rank.stream == source.of {
            rank.heard = true;
        } else if rank.heard || rank.fed_twice {
            rank.fed_twice = true;
            out.transitions
                .extend(self.trust.lower(batch.of, Reason::FedTwice, now));
        } else {
            rank.stream = source.of;
            rank.heard = true;
            rank.flaw = source.loss;
            source.feeds.push(batch.of);
        }
        let was = rank.flaw;
        let mut cleared = false;
        for event in &batch.events {
            if event.of != batch.of {
                rank.flaw = Some(Reason::Malformed);
                continue;
            }
            let applied = self.index.apply(event);
            self.counters.applied(event, &applied);
            match (&event.change, applied.refused) {
                (Change::Cleared, None) => {
                    cleared = true;
                    rank.flaw = None;
                    settle_stale(&self.trust, batch.of, now, out, |_| true);
                }
                (
                    Change::Removed {
                        tier: Tier::Device,
                        engine_hashes,
                    },
                    None,
                ) => {
                    settle_stale(&self.trust, batch.of, now, out, |missing| {
                        missing.is_some_and(|missing| {
                            engine_hashes.contains(&missing)
                                && !holds(&self.index, batch.of, missing)
                        })
                    });
                }
                // Claims are about device memory: what is refused of the other tiers cannot make one wrong.
                (Change::Stored(stored), Some(why))
                    if stored.tier == Tier::Device
                        && told == Told::New
                        // Else something is missing anyway: that is the reason, and is being seen to.
                        && rank.flaw.is_none() =>
                {
                    rank.flaw = Some(match why {
                        Refused::UnknownParent => Reason::UnknownParent,
                        _ => Reason::RefusedEvent,
                    });
                    source.doubted = true;
                }
                _ => {}
            }
        }
        if let Some(why) = batch.flaw {
            rank.flaw = rank.flaw.or(Some(why));
            // The same bytes again would not help, the state itself does.
            source.doubted |= why == Reason::Malformed && source.link.dumps && told == Told::New;
        }
        let changed = was != rank.flaw;
        if cleared {
            self.after_clear(source);
        }
        self.counters
            .told(batch.of, batch.events.len(), batch.made, now);
        out.transitions.extend(self.trust.heard(batch.of, seq, now));
        changed
    }

    /// An engine that says that its cache is empty settles what was missing before.
    fn after_clear(&mut self, source: &mut Source<D::Payload>) {
        let mut flaws = source.feeds.iter().filter_map(|of| self.ranks.get(of));
        if flaws.all(|rank| rank.flaw.is_none()) {
            source.loss = None;
            source.doubted = false;
            if source.is_degraded() {
                source.want = None;
                source.failures = 0;
            }
        }
    }

    /// The answer from the last applied frame on.
    fn rest(
        &mut self,
        source: &mut Source<D::Payload>,
        sent: &Sent,
        frames: Vec<Frame<D::Payload>>,
        now: Millis,
        out: &mut Outcome,
    ) {
        match self.joint(source, &frames) {
            Some(at) => {
                self.add(source, &frames[at + 1..], Told::New, now, out);
                self.counters.recovered(Recovered::Added);
                self.finish(source, now, out);
            }
            // The last frame was never seen, but nothing came after it.
            None if !source.can_compare()
                && frames.last().map(|frame| frame.seq) == source.cursor.last() =>
            {
                if let Some(frame) = frames.last() {
                    source.cursor.learn(self.decode.digest(&frame.payload));
                }
                self.counters.recovered(Recovered::Added);
                self.finish(source, now, out);
            }
            None => {
                let last = source.cursor.last();
                let begins_later = frames.first().is_some_and(|first| Some(first.seq) > last);
                if begins_later && !source.link.dumps {
                    // It has no older ones: asking for all would bring the same.
                    self.replace(source, sent, frames, now, out);
                } else {
                    self.counters.recovered(Recovered::OtherLife);
                    source.want = Some(Need::Full);
                }
            }
        }
    }

    /// The answer with all frames that there still are.
    fn replace(
        &mut self,
        source: &mut Source<D::Payload>,
        sent: &Sent,
        frames: Vec<Frame<D::Payload>>,
        now: Millis,
        out: &mut Outcome,
    ) {
        let from_start = frames.first().is_none_or(|first| first.seq == 0);
        let joint = self.joint(source, &frames);
        if let (false, Some(at), None) = (from_start, joint, source.loss) {
            // Nothing was missed and the start is gone: what is known is the best there is.
            self.add(source, &frames[at + 1..], Told::New, now, out);
            source.too_old = true;
            self.counters.recovered(Recovered::TooShort);
        } else {
            let loss = (!from_start).then_some(Reason::ReplayTooShort);
            self.new_life(source, loss);
            self.add(source, &frames, Told::All, now, out);
            source.too_old = !from_start;
            self.counters.recovered(if from_start {
                Recovered::Replaced
            } else {
                Recovered::TooShort
            });
            if from_start {
                self.settle(sent, now, out);
            }
        }
        self.finish(source, now, out);
    }

    /// Where in `frames` the last applied one is, if it is the same.
    fn joint(&self, source: &Source<D::Payload>, frames: &[Frame<D::Payload>]) -> Option<usize> {
        let last = source.cursor.last()?;
        let at = frames.iter().position(|frame| frame.seq == last)?;
        let content = self.decode.digest(&frames[at].payload);
        (source.cursor.content(last) == Some(content)).then_some(at)
    }

    fn add(
        &mut self,
        source: &mut Source<D::Payload>,
        frames: &[Frame<D::Payload>],
        told: Told,
        now: Millis,
        out: &mut Outcome,
    ) {
        for frame in frames {
            let content = self.decode.digest(&frame.payload);
            self.apply(source, frame.seq, &frame.payload, told, now, out);
            source.cursor.replayed(frame.seq, content, now);
        }
    }

    /// The answer was applied: the frames that waited for it follow.
    fn finish(&mut self, source: &mut Source<D::Payload>, now: Millis, out: &mut Outcome) {
        source.want = None;
        source.failures = 0;
        let Some(mut held) = source.held.take() else {
            return;
        };
        let reached = source.cursor.last();
        let mut of_other_life = 0;
        for frame in held.frames.drain(..held.before) {
            if Some(frame.seq) <= reached {
                let content = self.decode.digest(&frame.payload);
                source.cursor.observe(frame.seq, content, now);
            } else {
                of_other_life += 1;
            }
        }
        self.release(source, held.frames.into(), now, out);
        if held.lost {
            source.want = source.want.max(Some(Need::Rest));
        }
        if of_other_life > 0 {
            // The engine has not come that far, so it started again. Ask once more before believing it.
            self.counters.dropped(Dropped::OtherLife, of_other_life);
            source.want = source.want.max(Some(Need::Rest));
            source.failures = source.failures.max(1);
        }
    }

    fn fail(&mut self, source: &mut Source<D::Payload>, now: Millis, out: &mut Outcome) {
        self.counters.recovered(Recovered::Failed);
        if source.failed() {
            return;
        }
        if source.want.is_some() {
            self.lose(source, Reason::RecoveryFailed);
        }
        let held = source.held.take().unwrap_or_default();
        self.release(source, held.frames.into(), now, out);
    }

    fn release(
        &mut self,
        source: &mut Source<D::Payload>,
        mut frames: Vec<Frame<D::Payload>>,
        now: Millis,
        out: &mut Outcome,
    ) {
        if source.link.order == Order::Unordered {
            frames.sort_by_key(|frame| frame.seq);
        }
        for frame in frames {
            self.live(source, frame, now, out);
        }
    }

    fn ask(&mut self, source: &mut Source<D::Payload>, now: Millis, out: &mut Outcome) {
        let Some(need) = source.due(now, &self.limits) else {
            return;
        };
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let marks = source.feeds.iter().filter(|of| self.owns(source, **of));
        let marks = marks.filter_map(|of| Some((*of, self.trust.mark(*of)?)));
        let sent = Sent {
            ticket,
            need,
            at: now,
            marks: marks.collect(),
        };
        let from_seq = match need {
            Need::Probe | Need::Rest => source.cursor.last(),
            Need::Full => None,
        };
        let by_number = source.link.replays && (from_seq.is_some() || !source.link.dumps);
        out.actions.push(if by_number {
            Action::Replay {
                of: source.of,
                from_seq: from_seq.unwrap_or(0),
                ticket,
            }
        } else {
            Action::Dump {
                of: source.of,
                ticket,
            }
        });
        source.ask(sent);
    }

    fn answered(&self, source: &mut Source<D::Payload>, ticket: Ticket) -> Option<Sent> {
        let sent = source.sent.take_if(|sent| sent.ticket == ticket);
        if sent.is_none() {
            self.counters.recovered(Recovered::TooLate);
        }
        sent
    }

    /// The engine is another one, or is to be learnt from anew.
    fn new_life(&mut self, source: &mut Source<D::Payload>, loss: Option<Reason>) {
        self.wipe(source);
        self.set_loss(source, loss);
        source.want = None;
        source.failures = 0;
        source.too_old = false;
    }

    fn wipe(&mut self, source: &mut Source<D::Payload>) {
        for of in &source.feeds {
            if self.owns(source, *of) {
                self.index.apply(&Event {
                    of: *of,
                    change: Change::Cleared,
                });
            }
        }
        self.decode.forget(source.of);
        source.cursor.reset();
        source.doubted = false;
    }

    fn back_up(&self, source: &mut Source<D::Payload>) {
        source.up = Some(true);
        if source.recovers() {
            source.want = source.want.max(Some(if source.can_compare() {
                Need::Rest
            } else {
                Need::Full
            }));
            source.held.get_or_insert_default();
        }
    }

    fn hold(&self, source: &mut Source<D::Payload>, frame: Frame<D::Payload>) {
        let held = source.held.get_or_insert_default();
        let dropped = held.push(frame, &self.limits, |payload| self.decode.bytes(payload));
        self.counters.dropped(Dropped::HeldQueue, dropped);
    }

    /// All ranks of the stream are as good as `loss` says.
    fn set_loss(&mut self, source: &mut Source<D::Payload>, loss: Option<Reason>) {
        source.loss = loss;
        for of in &source.feeds {
            if let Some(rank) = self.ranks.get_mut(of)
                && rank.stream == source.of
            {
                rank.flaw = loss;
            }
        }
    }

    fn lose(&mut self, source: &mut Source<D::Payload>, why: Reason) {
        self.set_loss(source, Some(why));
    }

    fn owns(&self, source: &Source<D::Payload>, of: WorkerRank) -> bool {
        let rank = self.ranks.get(&of);
        rank.is_some_and(|rank| rank.stream == source.of)
    }

    fn alive(&self, source: &Source<D::Payload>, now: Millis, out: &mut Outcome) {
        for of in source.feeds.iter().filter(|of| self.owns(source, **of)) {
            out.transitions.extend(self.trust.alive(*of, now));
        }
    }

    /// Tells the book what the ranks of the stream lack.
    fn publish(&self, source: &Source<D::Payload>, now: Millis, out: &mut Outcome) {
        let lacks = source.lacks();
        for of in &source.feeds {
            let Some(rank) = self.ranks.get(of).filter(|rank| rank.stream == source.of) else {
                continue;
            };
            let fed_twice = rank.fed_twice.then_some(Reason::FedTwice);
            let told = match fed_twice.or(lacks).or(rank.flaw) {
                Some(why) => self.trust.lower(*of, why, now),
                None => self.trust.caught_up(*of, now),
            };
            out.transitions.extend(told);
        }
    }

    fn settle(&self, sent: &Sent, now: Millis, out: &mut Outcome) {
        for (of, mark) in &sent.marks {
            out.transitions
                .extend(self.trust.settle_before(*of, *mark, now));
        }
    }

    /// A stale report that events do not settle soon is a reason to ask for all.
    fn compare_stale(&mut self, source: &mut Source<D::Payload>, now: Millis, out: &mut Outcome) {
        for of in &source.feeds {
            let Some(rank) = self
                .ranks
                .get_mut(of)
                .filter(|rank| rank.stream == source.of)
            else {
                continue;
            };
            let report = self.trust.stale_report(*of);
            match (report, rank.compared) {
                (None, _) => rank.compared = None,
                (Some(said), Some((compared, at))) if said == compared => {
                    source.doubted |= now.since(at) >= self.limits.retry_first;
                }
                (Some(said), _) => {
                    rank.compared = Some((said, now));
                    settle_stale(&self.trust, *of, now, out, |missing| {
                        missing.is_some_and(|missing| !holds(&self.index, *of, missing))
                    });
                }
            }
        }
    }
}

fn settle_stale(
    trust: &TrustBook,
    of: WorkerRank,
    now: Millis,
    out: &mut Outcome,
    is_settled: impl Fn(Option<EngineHash>) -> bool,
) {
    if let Some(said) = trust.stale_report(of)
        && is_settled(said.missing)
    {
        out.transitions.extend(trust.settle_stale(of, said, now));
    }
}

/// Whether the index says that the rank holds the block in device memory.
fn holds(index: &Index, of: WorkerRank, block: EngineHash) -> bool {
    let held = index.held(of);
    held.iter()
        .any(|held| held.tier == Tier::Device && held.engine == block)
}
