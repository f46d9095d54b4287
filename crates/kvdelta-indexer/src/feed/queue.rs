//! The bounded queue between sockets and ingest.
//!
//! It is bounded in messages and in bytes. Messages never wait: what does not fit is dropped and
//! counted, and where it is missing a `Signal::Dropped` stands. The other signals wait for room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::feed::{Frame, Signal};

/// How much waits at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Messages, at least 1.
    pub frames: usize,
    /// Bytes of their payloads.
    pub bytes: u32,
}

impl Default for Limits {
    /// Room for seconds of a large fleet.
    fn default() -> Self {
        Self {
            frames: 16_384,
            bytes: 256 << 20,
        }
    }
}

/// What went through the queue.
#[derive(Debug, Default)]
pub struct Counts {
    queued: AtomicU64,
    dropped: AtomicU64,
    malformed: AtomicU64,
}

impl Counts {
    /// Messages that were queued.
    pub fn queued(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Messages that found no room.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Messages that are none of the protocol's.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }
}

/// Names a feed among those of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FeedId(pub u64);

/// One signal and whose it is. Its room in the queue is free when it is dropped.
#[derive(Debug)]
pub struct Heard {
    /// The feed that says it.
    pub from: FeedId,
    /// What.
    pub signal: Signal,
    _room: Option<OwnedSemaphorePermit>,
}

/// A queue with its two ends.
pub fn queue(limits: Limits) -> (Inlet, Outlet) {
    let (to, from) = mpsc::channel(limits.frames.max(1));
    let inlet = Inlet {
        to,
        room: Arc::new(Semaphore::new(limits.bytes as usize)),
        counts: Arc::default(),
    };
    let outlet = Outlet {
        from,
        counts: Arc::clone(&inlet.counts),
    };
    (inlet, outlet)
}

/// The end that ingest reads.
#[derive(Debug)]
pub struct Outlet {
    from: mpsc::Receiver<Heard>,
    counts: Arc<Counts>,
}

impl Outlet {
    /// The next signal; `None`: all feeds are gone. May be cancelled at any time.
    pub async fn next(&mut self) -> Option<Heard> {
        self.from.recv().await
    }

    /// The next signal if one waits.
    pub fn try_next(&mut self) -> Option<Heard> {
        self.from.try_recv().ok()
    }

    /// What went through the queue so far.
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }
}

/// The end that feeds write to.
#[derive(Clone, Debug)]
pub struct Inlet {
    to: mpsc::Sender<Heard>,
    room: Arc<Semaphore>,
    counts: Arc<Counts>,
}

impl Inlet {
    /// Waits for room and says it; `false`: nobody listens any more.
    async fn tell(&self, from: FeedId, signal: Signal) -> bool {
        let heard = Heard {
            from,
            signal,
            _room: None,
        };
        self.to.send(heard).await.is_ok()
    }

    /// A writer for the feed `from`.
    pub fn tap(&self, from: FeedId) -> Tap {
        Tap {
            inlet: self.clone(),
            from,
            dropped: 0,
        }
    }

    /// Waits until nobody listens any more.
    pub async fn closed(&self) {
        self.to.closed().await;
    }
}

/// Where one connection puts what it hears.
#[derive(Debug)]
pub struct Tap {
    inlet: Inlet,
    from: FeedId,
    dropped: u64,
}

impl Tap {
    /// Puts a message into the queue, or drops it if there is no room.
    pub fn offer(&mut self, frame: Frame) {
        if !self.try_offer(frame) {
            self.lost();
        }
    }

    /// Counts a message that was lost before it came here.
    pub fn lost(&mut self) {
        self.dropped += 1;
        let dropped = self.inlet.counts.dropped.fetch_add(1, Ordering::Relaxed) + 1;
        if dropped.is_power_of_two() {
            tracing::warn!(
                feed = self.from.0,
                dropped,
                "event queue full, message dropped"
            );
        }
    }

    fn try_offer(&mut self, frame: Frame) -> bool {
        if self.dropped > 0 && !self.try_tell_dropped() {
            return false;
        }
        let Ok(bytes) = u32::try_from(frame.bytes()) else {
            return false;
        };
        let Ok(room) = Arc::clone(&self.inlet.room).try_acquire_many_owned(bytes) else {
            return false;
        };
        let heard = Heard {
            from: self.from,
            signal: Signal::Frame(frame),
            _room: Some(room),
        };
        let queued = !matches!(self.inlet.to.try_send(heard), Err(TrySendError::Full(_)));
        if queued {
            self.inlet.counts.queued.fetch_add(1, Ordering::Relaxed);
        }
        queued
    }

    fn try_tell_dropped(&mut self) -> bool {
        let heard = self.dropped_so_far();
        let told = !matches!(self.inlet.to.try_send(heard), Err(TrySendError::Full(_)));
        if told {
            self.dropped = 0;
        }
        told
    }

    fn dropped_so_far(&self) -> Heard {
        Heard {
            from: self.from,
            signal: Signal::Dropped {
                frames: self.dropped,
            },
            _room: None,
        }
    }

    /// Says as soon as there is room what was dropped; `false`: nobody listens any more. Waits while
    /// neither is so.
    ///
    /// For the loop that reads the socket, so that a loss is known though no message follows it. May be
    /// cancelled at any time.
    pub async fn tell_dropped(&mut self) -> bool {
        if self.dropped == 0 {
            self.inlet.closed().await;
            return false;
        }
        let Ok(slot) = self.inlet.to.reserve().await else {
            return false;
        };
        slot.send(self.dropped_so_far());
        self.dropped = 0;
        true
    }

    /// Counts a message that is none of the protocol's, and says that one is missing.
    pub fn malformed(&mut self, why: &str) {
        let malformed = self.inlet.counts.malformed.fetch_add(1, Ordering::Relaxed) + 1;
        if malformed.is_power_of_two() {
            tracing::warn!(
                feed = self.from.0,
                malformed,
                why,
                "not a message of the protocol"
            );
        }
        self.dropped += 1;
    }

    /// Waits for room and says it, after what was dropped before; `false`: nobody listens any more.
    pub async fn tell(&mut self, signal: Signal) -> bool {
        if self.dropped > 0 && !self.tell_dropped().await {
            return false;
        }
        self.inlet.tell(self.from, signal).await
    }

    /// Waits until nobody listens any more.
    pub async fn closed(&self) {
        self.inlet.closed().await;
    }
}
