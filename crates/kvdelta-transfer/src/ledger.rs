//! The life of the offers of a prefill worker: leased when made, closed once.
//!
//! An offer may end by the notices of its decode worker's ranks, by the end of its lease, by a later request
//! that asks for its release, or by an abort; several of these may come, in any order, late or twice. The first
//! one that counts closes the offer and says how many blocks are to be released; all others find nothing.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use kvdelta_indexer::Millis;
use thiserror::Error;

#[cfg(test)]
mod tests;

/// One of the ranks of a prefill worker whose blocks are read on their own, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

/// What an offer was cut to, over all cache groups of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OfferBlocks {
    /// Blocks that the decode worker has by its claim; to be released at once.
    pub skipped: u64,
    /// Blocks that stay leased until the offer is closed.
    pub offered: u64,
}

/// What closed an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// All ranks were told that their blocks were read, or are not needed.
    Notice,
    /// The lease ended.
    Expiry,
    /// A later request asked for it.
    Release,
    /// The request was aborted.
    Abort,
}

impl Ending {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Notice, Self::Expiry, Self::Release, Self::Abort];

    /// The label of metrics, which [`FromStr`] reads.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Notice => "notice",
            Self::Expiry => "expiry",
            Self::Release => "release",
            Self::Abort => "abort",
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.label())
    }
}

impl FromStr for Ending {
    type Err = BadEnding;

    fn from_str(label: &str) -> Result<Self, BadEnding> {
        let mut all = Self::ALL.into_iter();
        all.find(|ending| ending.label() == label)
            .ok_or_else(|| BadEnding(label.to_owned()))
    }
}

/// A text that names no [`Ending`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no ending: it is notice, expiry, release or abort")]
pub struct BadEnding(pub String);

/// An offer whose blocks are free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// What closed it.
    pub ending: Ending,
    /// Blocks to release now: those offered, and those skipped for which [`Ledger::release_skipped`] was not
    /// called before.
    pub released_blocks: u64,
    /// Offered blocks times the milliseconds that they stayed leased.
    pub pinned_block_ms: u64,
}

#[derive(Debug)]
struct Lease {
    /// What is not released yet.
    blocks: OfferBlocks,
    opened: Millis,
    ends: Millis,
    told: BTreeSet<Rank>,
}

impl Lease {
    fn pinned(&self) -> u64 {
        self.blocks.offered.saturating_add(self.blocks.skipped)
    }

    fn close(&self, ending: Ending, now: Millis) -> Closed {
        let ms = now.since(self.opened).as_millis();
        let pinned = u128::from(self.blocks.offered).saturating_mul(ms);
        Closed {
            ending,
            released_blocks: self.pinned(),
            pinned_block_ms: u64::try_from(pinned).unwrap_or(u64::MAX),
        }
    }
}

/// The open offers of a prefill worker; every block is released exactly once.
///
/// It forgets an offer when it is closed. A request id that comes again is another offer, so ids must not be
/// used again while notices of the former one may be under way. Each call but [`expire`](Self::expire) and
/// [`pinned_blocks`](Self::pinned_blocks) takes a time that grows with the logarithm of the open offers.
#[derive(Debug)]
pub struct Ledger {
    ranks: NonZeroU32,
    leases: HashMap<Arc<str>, Lease>,
    by_end: BTreeSet<(Millis, Arc<str>)>,
}

impl Ledger {
    /// Without offers. `ranks`: how many ranks of this worker have to report before an offer is closed.
    pub fn new(ranks: NonZeroU32) -> Self {
        Self {
            ranks,
            leases: HashMap::new(),
            by_end: BTreeSet::new(),
        }
    }

    /// Leases the blocks of an offer for `time`; `false`: the request has an open offer, and nothing changes.
    pub fn open(
        &mut self,
        request: &str,
        blocks: OfferBlocks,
        now: Millis,
        time: Duration,
    ) -> bool {
        if self.leases.contains_key(request) {
            return false;
        }
        let request: Arc<str> = request.into();
        let lease = Lease {
            blocks,
            opened: now,
            ends: now.plus(time),
            told: BTreeSet::new(),
        };
        self.by_end.insert((lease.ends, request.clone()));
        self.leases.insert(request, lease);
        true
    }

    /// Skipped blocks to release now; 0 on every call but the first, and for a request without an open offer.
    pub fn release_skipped(&mut self, request: &str) -> u64 {
        let lease = self.leases.get_mut(request);
        lease.map_or(0, |lease| std::mem::take(&mut lease.blocks.skipped))
    }

    /// A rank was told that its blocks were read; the last one closes the offer.
    ///
    /// `None`: other ranks have yet to report, this rank did before, it is none of this worker's, or the request
    /// has no open offer.
    pub fn notice(&mut self, request: &str, rank: Rank, now: Millis) -> Option<Closed> {
        if rank.0 >= self.ranks.get() {
            return None;
        }
        let lease = self.leases.get_mut(request)?;
        lease.told.insert(rank);
        let all = u32::try_from(lease.told.len()).is_ok_and(|told| told == self.ranks.get());
        all.then(|| self.close(request, Ending::Notice, now))?
    }

    /// Closes an offer whatever ranks have reported; `None`: the request has no open one.
    pub fn close(&mut self, request: &str, ending: Ending, now: Millis) -> Option<Closed> {
        let (request, lease) = self.leases.remove_entry(request)?;
        self.by_end.remove(&(lease.ends, request));
        Some(lease.close(ending, now))
    }

    /// Renews a lease, which never shortens it; `false`: the request has no open offer.
    ///
    /// A lease that has ended and was not closed by [`expire`](Self::expire) still holds its blocks, so it can be
    /// renewed.
    pub fn extend(&mut self, request: &str, now: Millis, time: Duration) -> bool {
        let Some((request, lease)) = self.leases.get_key_value(request) else {
            return false;
        };
        let (request, before, ends) = (request.clone(), lease.ends, now.plus(time));
        if ends > before {
            self.by_end.remove(&(before, request.clone()));
            if let Some(lease) = self.leases.get_mut(&request) {
                lease.ends = ends;
            }
            self.by_end.insert((ends, request));
        }
        true
    }

    /// Closes all offers whose lease has ended, the earliest end first.
    pub fn expire(&mut self, now: Millis) -> Vec<(Arc<str>, Closed)> {
        let mut closed = Vec::new();
        while let Some((ends, request)) = self.by_end.first()
            && *ends <= now
        {
            let request = request.clone();
            let Some(expired) = self.close(&request, Ending::Expiry, now) else {
                break;
            };
            closed.push((request, expired));
        }
        closed
    }

    /// Blocks that nobody else can use: offered ones, and skipped ones that were not released yet.
    pub fn pinned_blocks(&self) -> u64 {
        let each = self.leases.values().map(Lease::pinned);
        each.fold(0, u64::saturating_add)
    }

    /// Open offers.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether no offer is open.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }
}
