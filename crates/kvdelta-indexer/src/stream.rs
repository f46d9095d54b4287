//! Where one event stream stands: what is new, missing, late, or of an engine that started again.

use std::collections::VecDeque;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use crate::time::Millis;

/// Late frames an unordered stream remembers by content.
const REMEMBERED: usize = 64;
/// Frames of an answer whose live copies may still be under way; more than vLLM keeps for replay (10,000).
const ECHOES: usize = 16_384;
/// How long after a jump a frame of the jumped range may still come in. An engine takes longer to start.
const LATE_FOR: Duration = Duration::from_secs(5);

/// Which order the transport keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Frames come in the order of their numbers (ZMQ PUB, one connection). A number that moves backwards
    /// means that the engine started again.
    Fifo,
    /// Frames may overtake each other (Dynamo's event plane): a lower number is late first of all.
    Unordered,
}

/// Content of a frame. Numbers start again with the engine, content hardly repeats: vLLM's and SGLang's
/// payloads carry a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(u64);

impl Digest {
    /// The digest of a payload.
    pub fn of(payload: &[u8]) -> Self {
        Self(xxh3_64(payload))
    }
}

/// What a frame is to its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// The one that was expected.
    Next,
    /// Frames before it did not come in.
    Gap {
        /// How many.
        missing: u64,
    },
    /// Applied already, or superseded by what was applied: ignore it.
    Stale,
    /// Of an engine that started again: what is known is of an earlier life.
    Restarted,
}

/// The last applied frame of one stream.
#[derive(Clone, Debug)]
pub struct Cursor {
    order: Order,
    last: Option<u64>,
    /// Contents of the last frames, that of `last` at the back; `None`: jumped over, never seen.
    contents: VecDeque<Option<Digest>>,
    jumped: Millis,
}

impl Cursor {
    /// A stream of which nothing is known: it expects frame 0.
    pub fn new(order: Order) -> Self {
        Self {
            order,
            last: None,
            contents: VecDeque::new(),
            jumped: Millis(0),
        }
    }

    /// Number of the last applied frame.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Content of frame `seq`, if it was applied and is still remembered.
    pub fn content(&self, seq: u64) -> Option<Digest> {
        self.slot(seq).and_then(|at| self.contents[at])
    }

    /// What a live frame is. Applies nothing: follow with [`advance`](Self::advance) where it is applied.
    pub fn observe(&mut self, seq: u64, content: Digest, now: Millis) -> Observed {
        let expected = self.last.map_or(Some(0), |last| last.checked_add(1));
        match expected {
            Some(expected) if seq == expected => return Observed::Next,
            Some(expected) if seq > expected => {
                let missing = seq - expected;
                return Observed::Gap { missing };
            }
            _ => {}
        }
        let Some(at) = self.slot(seq) else {
            return Observed::Restarted;
        };
        match (self.contents[at], self.order) {
            (Some(known), _) if known == content => Observed::Stale,
            (None, Order::Unordered) if seq > 0 && now.since(self.jumped) <= LATE_FOR => {
                self.contents[at] = Some(content);
                Observed::Stale
            }
            _ => Observed::Restarted,
        }
    }

    /// A live frame was applied. Numbers between it and the last one count as missed.
    pub fn advance(&mut self, seq: u64, content: Digest, now: Millis) {
        let keep = match self.order {
            // What comes in now comes after all that was replayed: no more copies are under way.
            Order::Fifo => 1,
            Order::Unordered => REMEMBERED,
        };
        self.push(seq, Some(content), keep, now);
    }

    /// A frame out of a replay was applied: its live copy may follow.
    pub fn replayed(&mut self, seq: u64, content: Digest, now: Millis) {
        self.push(seq, Some(content), ECHOES, now);
    }

    /// The state as of frame `seq` was taken from elsewhere. Live copies from frame `oldest` on came in
    /// meanwhile.
    pub fn jump(&mut self, seq: u64, oldest: Option<u64>, now: Millis) {
        self.contents.clear();
        self.last = None;
        let behind = oldest.and_then(|oldest| usize::try_from(seq.checked_sub(oldest)?).ok());
        let behind = behind.filter(|behind| *behind < ECHOES).unwrap_or(0);
        self.push(seq, None, REMEMBERED.max(behind + 1), now);
        self.jumped = now;
    }

    /// The last frame, whose state was taken from elsewhere, has this content.
    pub fn learn(&mut self, content: Digest) {
        if let Some(last) = self.contents.back_mut() {
            last.get_or_insert(content);
        }
    }

    /// Nothing is known any more.
    pub fn reset(&mut self) {
        self.contents.clear();
        self.last = None;
    }

    fn slot(&self, seq: u64) -> Option<usize> {
        let behind = usize::try_from(self.last?.checked_sub(seq)?).ok()?;
        self.contents.len().checked_sub(behind.checked_add(1)?)
    }

    fn push(&mut self, seq: u64, content: Option<Digest>, keep: usize, now: Millis) {
        let missed = match self.last {
            Some(last) if seq > last => seq - last - 1,
            Some(_) => {
                self.contents.clear();
                seq
            }
            None => seq,
        };
        if missed > 0 {
            self.jumped = now;
        }
        let missed = usize::try_from(missed).map_or(keep, |missed| missed.min(keep));
        self.contents.extend(std::iter::repeat_n(None, missed));
        self.contents.push_back(content);
        let surplus = self.contents.len().saturating_sub(keep);
        self.contents.drain(..surplus);
        self.last = Some(seq);
    }
}

#[cfg(test)]
mod tests {
    use super::{Cursor, Digest, LATE_FOR, Observed, Order, REMEMBERED};
    use crate::time::Millis;

    const NOW: Millis = Millis(1_000_000);

    fn frame(seq: u64) -> Digest {
        Digest::of(&seq.to_le_bytes())
    }

    fn at(order: Order, last: u64) -> Cursor {
        let mut cursor = Cursor::new(order);
        for seq in 0..=last {
            cursor.advance(seq, frame(seq), NOW);
        }
        cursor
    }

    #[test]
    fn what_a_frame_is_to_a_stream_that_applied_0_to_40() {
        let other = Digest::of(b"other");
        for (order, seq, content, expected) in [
            (Order::Fifo, 41, other, Observed::Next),
            (Order::Fifo, 55, other, Observed::Gap { missing: 14 }),
            (Order::Fifo, 40, frame(40), Observed::Stale),
            (Order::Fifo, 40, other, Observed::Restarted),
            (Order::Fifo, 39, frame(39), Observed::Restarted),
            (Order::Fifo, 0, other, Observed::Restarted),
            (Order::Unordered, 41, other, Observed::Next),
            (Order::Unordered, 43, other, Observed::Gap { missing: 2 }),
            (Order::Unordered, 12, frame(12), Observed::Stale),
            (Order::Unordered, 12, other, Observed::Restarted),
            (Order::Unordered, 0, other, Observed::Restarted),
        ] {
            let observed = at(order, 40).observe(seq, content, NOW);
            assert_eq!(observed, expected, "{order:?} {seq}");
        }
    }

    #[test]
    fn the_first_frame_is_expected_to_be_the_first_of_the_engine() {
        for order in [Order::Fifo, Order::Unordered] {
            let mut cursor = Cursor::new(order);
            assert_eq!(cursor.observe(0, frame(0), NOW), Observed::Next);
            let gap = Observed::Gap { missing: 7 };
            assert_eq!(cursor.observe(7, frame(7), NOW), gap);
        }
    }

    #[test]
    fn copies_of_replayed_frames_are_stale_until_the_stream_goes_on() {
        let mut cursor = at(Order::Fifo, 40);
        for seq in 41..=50 {
            cursor.replayed(seq, frame(seq), NOW);
        }
        assert_eq!(cursor.observe(44, frame(44), NOW), Observed::Stale);
        assert_eq!(cursor.observe(44, frame(0), NOW), Observed::Restarted);
        assert_eq!(cursor.observe(51, frame(51), NOW), Observed::Next);
        cursor.advance(51, frame(51), NOW);
        assert_eq!(cursor.observe(44, frame(44), NOW), Observed::Restarted);
    }

    #[test]
    fn what_was_jumped_over_may_be_late_once_and_for_a_while() {
        let mut cursor = at(Order::Unordered, 9);
        cursor.jump(15, None, NOW);
        assert_eq!(cursor.observe(12, frame(12), NOW), Observed::Stale);
        assert_eq!(cursor.observe(12, frame(12), NOW), Observed::Stale);
        assert_eq!(cursor.observe(12, frame(0), NOW), Observed::Restarted);
        assert_eq!(cursor.observe(0, frame(0), NOW), Observed::Restarted);
        let later = NOW.plus(LATE_FOR * 2);
        assert_eq!(cursor.observe(13, frame(13), later), Observed::Restarted);
        assert_eq!(cursor.observe(16, frame(16), later), Observed::Next);
    }

    #[test]
    fn hostile_numbers_cost_no_memory() {
        for order in [Order::Fifo, Order::Unordered] {
            let mut cursor = at(order, 3);
            let missing = u64::MAX - 4;
            let seen = cursor.observe(u64::MAX, frame(0), NOW);
            assert_eq!(seen, Observed::Gap { missing });
            cursor.advance(u64::MAX, frame(0), NOW);
            assert!(cursor.contents.len() <= REMEMBERED);
            assert_eq!(cursor.observe(u64::MAX, frame(0), NOW), Observed::Stale);
            assert_eq!(cursor.observe(5, frame(5), NOW), Observed::Restarted);
            cursor.jump(u64::MAX, Some(0), NOW);
            cursor.replayed(2, frame(2), NOW);
            assert_eq!(cursor.last(), Some(2));
        }
    }
}
