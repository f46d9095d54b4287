//! One stream and what it waits for.

use std::collections::VecDeque;
use std::time::Duration;

use crate::ids::WorkerRank;
use crate::ingest::types::{Frame, Limits, Link, Ticket};
use crate::stream::Cursor;
use crate::time::Millis;
use crate::trust::{Mark, Reason};

/// Failures in a row after which live frames are applied without what is missing, for routing.
const PATIENCE: u32 = 3;

/// What a request has to bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    /// Proof that nothing is missing. Trust stays as it is meanwhile.
    Probe,
    /// What comes after the last applied frame.
    Rest,
    /// All: what is known is replaced.
    Full,
}

#[derive(Debug)]
pub(super) struct Sent {
    pub(super) ticket: Ticket,
    pub(super) need: Need,
    pub(super) at: Millis,
    pub(super) marks: Vec<(WorkerRank, Mark)>,
}

/// Live frames that wait for an answer.
#[derive(Debug)]
pub(super) struct Held<P> {
    pub(super) frames: VecDeque<Frame<P>>,
    bytes: usize,
    /// How many of them came in before the answer was asked for. Engines keep a frame before or while they
    /// publish it, so an answer that does not reach such a frame is of another life of the engine.
    pub(super) before: usize,
    /// A full queue dropped frames since the answer was asked for, which it need not cover.
    pub(super) lost: bool,
}

impl<P> Default for Held<P> {
    fn default() -> Self {
        Self {
            frames: VecDeque::new(),
            bytes: 0,
            before: 0,
            lost: false,
        }
    }
}

impl<P> Held<P> {
    /// Keeps a frame: how many older ones were dropped for it. The answer covers the oldest ones anyway.
    pub(super) fn push(
        &mut self,
        frame: Frame<P>,
        limits: &Limits,
        bytes: impl Fn(&P) -> usize,
    ) -> usize {
        self.bytes = self.bytes.saturating_add(bytes(&frame.payload));
        self.frames.push_back(frame);
        let mut dropped = 0;
        while self.frames.len() > 1
            && (self.frames.len() > limits.held_frames || self.bytes > limits.held_bytes)
            && let Some(oldest) = self.frames.pop_front()
        {
            self.bytes = self.bytes.saturating_sub(bytes(&oldest.payload));
            self.before = self.before.saturating_sub(1);
            dropped += 1;
        }
        dropped
    }
}

#[derive(Debug)]
pub(super) struct Source<P> {
    pub(super) of: WorkerRank,
    pub(super) link: Link,
    pub(super) cursor: Cursor,
    /// The ranks that this stream tells of.
    pub(super) feeds: Vec<WorkerRank>,
    /// Whether the connection stands, where the feed has said so.
    pub(super) up: Option<bool>,
    /// Why ranks of this stream that it has not told of yet would not be complete.
    pub(super) loss: Option<Reason>,
    /// What was lost and has to be asked for. `Full` without held frames: live frames are applied although
    /// something is missing.
    pub(super) want: Option<Need>,
    /// An event or a decode worker contradicts the index, although no frame is missing: ask for all.
    pub(super) doubted: bool,
    /// A replay does not reach the engine's start any more, and it will not in this life of the engine.
    pub(super) too_old: bool,
    pub(super) sent: Option<Sent>,
    pub(super) held: Option<Held<P>>,
    pub(super) failures: u32,
    fulls: u32,
    last_try: Millis,
    last_full: Millis,
    /// Last frame or answer.
    pub(super) heard: Millis,
}

impl<P> Source<P> {
    pub(super) fn new(of: WorkerRank, link: Link, now: Millis) -> Self {
        Self {
            of,
            link,
            cursor: Cursor::new(link.order),
            feeds: vec![of],
            up: None,
            loss: Some(Reason::NeverHeard),
            want: None,
            doubted: false,
            too_old: false,
            sent: None,
            held: None,
            failures: 0,
            fulls: 0,
            last_try: Millis(0),
            last_full: Millis(0),
            heard: now,
        }
    }

    pub(super) fn recovers(&self) -> bool {
        self.link.replays || self.link.dumps
    }

    /// The last applied frame's content is known, so that an answer can be compared with it.
    pub(super) fn can_compare(&self) -> bool {
        let last = self.cursor.last();
        last.and_then(|last| self.cursor.content(last)).is_some()
    }

    /// Live frames are applied although something is missing.
    pub(super) fn is_degraded(&self) -> bool {
        self.want == Some(Need::Full) && self.held.is_none()
    }

    /// What to ask for, and that nothing forbids to ask now.
    pub(super) fn due(&mut self, now: Millis, limits: &Limits) -> Option<Need> {
        if self.sent.is_some() || self.up == Some(false) || !self.recovers() {
            return None;
        }
        let doubted = self.doubted && (self.link.dumps || !self.too_old);
        let mut need = match self.want {
            None | Some(Need::Probe) if doubted => Need::Full,
            want => want?,
        };
        if need == Need::Rest && !self.can_compare() {
            need = Need::Full;
        }
        let waited = |since: Millis, tries| tries == 0 || now >= since.plus(wait(tries, limits));
        let may_ask = waited(self.last_try, self.failures)
            && (need != Need::Full || waited(self.last_full, self.fulls_lately(now, limits)));
        may_ask.then_some(need)
    }

    pub(super) fn ask(&mut self, sent: Sent) {
        self.last_try = sent.at;
        if sent.need == Need::Full {
            self.fulls = self.fulls.saturating_add(1);
            self.last_full = sent.at;
        }
        let held = self.held.get_or_insert_default();
        held.before = held.frames.len();
        held.lost = false;
        self.sent = Some(sent);
    }

    /// `true`: go on holding frames until the next try.
    pub(super) fn failed(&mut self) -> bool {
        self.sent = None;
        self.failures = self.failures.saturating_add(1);
        match self.want {
            Some(Need::Rest) if self.failures < PATIENCE => true,
            Some(Need::Rest | Need::Full) => {
                self.want = Some(Need::Full);
                false
            }
            Some(Need::Probe) | None => {
                self.want = None;
                false
            }
        }
    }

    /// What the ranks lack besides their own flaws.
    pub(super) fn lacks(&self) -> Option<Reason> {
        let asked = self.sent.as_ref().map(|sent| sent.need);
        match (self.want.max(asked), asked) {
            (None | Some(Need::Probe), _) => None,
            (Some(_), _) if self.up == Some(false) => Some(Reason::Disconnected),
            (Some(_), None) if self.failures > 0 => Some(Reason::RecoveryFailed),
            (Some(_), _) => Some(Reason::Recovering),
        }
    }

    /// Refreshes of all that were asked for lately: each is dear, so they keep a distance that grows.
    fn fulls_lately(&mut self, now: Millis, limits: &Limits) -> u32 {
        if now.since(self.last_full) > wait(self.fulls, limits).saturating_mul(2) {
            self.fulls = 0;
        }
        self.fulls
    }
}

fn wait(tries: u32, limits: &Limits) -> Duration {
    let doubled = 2_u32.saturating_pow(tries.saturating_sub(1));
    limits
        .retry_first
        .saturating_mul(doubled)
        .min(limits.retry_most)
}
