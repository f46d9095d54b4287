//! Events of an engine to events of the index.

use crate::event::{Change, Copies, Event, Stored, StoredBlock};
use crate::hash::{PromptOf, block_hashes, namespace};
use crate::ids::{BlockSize, EngineHash, Namespace, Tier, WorkerRank};
use crate::wire::batch::{Place, WireEvent, WireStored};
use crate::wire::groups::{CacheGroups, Groups};
use crate::wire::skipped::{Skipped, shown};

/// Which engine speaks. Both encode events alike; they mean different things by two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// A hash may lie in two physical blocks, each with a removal of its own. The salt is told with the
    /// first block of a chain only.
    ///
    /// A request that asks vLLM to report what it reuses (`kv_cache_report_mode: full`, vLLM 0.31
    /// `v1/request.py`) announces blocks again without a second copy. That looks the same, so such a
    /// block outlives its removal in the index, until the cache is cleared.
    Vllm,
    /// A hash is stored once. The salt is told with every block: none is no salt. A request's
    /// `extra_key` that is neither salt nor adapter is not told at all.
    Sglang,
}

/// Makes events for the index of what one rank's engine sends.
///
/// It remembers the rank's cache groups and nothing that grows. An engine that restarts needs a new one.
#[derive(Clone, Debug)]
pub struct Normalizer {
    of: WorkerRank,
    block_size: BlockSize,
    dialect: Dialect,
    groups: Groups,
}

/// What one event of an engine comes to. Both may be there, if only a part of a run could be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Normalized {
    /// What to apply to the index.
    pub event: Option<Event>,
    /// What was left out.
    pub skipped: Option<Skipped>,
}

impl From<Skipped> for Normalized {
    fn from(why: Skipped) -> Self {
        Self {
            event: None,
            skipped: Some(why),
        }
    }
}

impl Normalizer {
    /// For one rank, whose engine must have the index's block size.
    pub fn new(of: WorkerRank, block_size: BlockSize, dialect: Dialect) -> Self {
        Self {
            of,
            block_size,
            dialect,
            groups: Groups::default(),
        }
    }

    /// What kinds of cache groups the rank has announced so far.
    pub fn groups(&self) -> CacheGroups {
        self.groups.seen()
    }

    /// Turns one event into one of the index.
    ///
    /// `namespace_of` asks the index for the namespace of a block that this rank holds
    /// (`Index::namespace_of`). A run whose namespace is that of an unknown parent becomes an event
    /// without blocks, which the index refuses for its parent: it never passes for unsalted.
    pub fn normalize(
        &mut self,
        event: WireEvent<'_>,
        namespace_of: impl Fn(EngineHash) -> Option<Namespace>,
    ) -> Normalized {
        let (change, skipped) = match event {
            WireEvent::Stored(stored) => match self.stored(stored, namespace_of) {
                Ok(done) => done,
                Err(why) => return why.into(),
            },
            WireEvent::Removed {
                engine_hashes,
                place,
            } => match self.tier(&place) {
                Ok(tier) if !engine_hashes.is_empty() => {
                    let change = Change::Removed {
                        tier,
                        engine_hashes,
                    };
                    (Some(change), None)
                }
                Ok(_) => (None, None),
                Err(why) => return why.into(),
            },
            WireEvent::Cleared { owner } => match owned(owner, Tier::Device) {
                Ok(()) => (Some(Change::Cleared), None),
                Err(why) => return why.into(),
            },
        };
        Normalized {
            event: change.map(|change| Event {
                of: self.of,
                change,
            }),
            skipped,
        }
    }

    fn stored(
        &mut self,
        wire: WireStored<'_>,
        namespace_of: impl Fn(EngineHash) -> Option<Namespace>,
    ) -> Result<(Option<Change>, Option<Skipped>), Skipped> {
        // Announced even by an event that is left out for its tier.
        self.groups.learn(wire.place.group, wire.place.kind);
        let tier = self.tier(&wire.place)?;
        if wire.tokens.is_empty() {
            let engine_hashes = wire.engine_hashes;
            let placed = (!engine_hashes.is_empty()).then_some(Change::Placed {
                tier,
                engine_hashes,
            });
            return Ok((placed, None));
        }
        self.check_counts(&wire)?;

        let (known, mut skipped) = match wire.unattributed {
            Some((block, why)) => (block, Some(why)),
            None => (wire.engine_hashes.len(), None),
        };
        if known == 0 {
            return Ok((None, skipped));
        }
        let namespace = match (wire.salt, wire.parent) {
            (None, Some(parent)) if self.dialect == Dialect::Vllm => namespace_of(parent),
            (salt, _) => Some(namespace(wire.lora, salt)),
        };
        let blocks = match (namespace, wire.parent) {
            (None, Some(parent)) => {
                skipped = Some(Skipped::UnknownNamespace(parent));
                Vec::new()
            }
            (None, None) => Vec::new(),
            (Some(namespace), _) => {
                let of = PromptOf {
                    namespace,
                    eagle: wire.eagle,
                    media: &wire.media,
                };
                let hashes = block_hashes(&wire.tokens, self.block_size, of);
                let named = hashes.into_iter().zip(&wire.engine_hashes);
                let named = named.map(|(block, engine)| StoredBlock {
                    block,
                    engine: *engine,
                });
                named.take(known).collect()
            }
        };
        let copies = match self.dialect {
            // Connectors tell a block of a lower tier once, however often it lies there.
            Dialect::Vllm if tier == Tier::Device => Copies::Counted,
            Dialect::Vllm | Dialect::Sglang => Copies::Single,
        };
        let stored = Stored {
            tier,
            parent: wire.parent,
            namespace,
            blocks,
            copies,
            source: wire.source,
        };
        Ok((Some(Change::Stored(stored)), skipped))
    }

    /// Whether every block has its tokens and no token is left over.
    fn check_counts(&self, wire: &WireStored<'_>) -> Result<(), Skipped> {
        let block_size = u32::from(self.block_size);
        if wire.block_size != u64::from(block_size) {
            return Err(Skipped::BlockSize {
                found: wire.block_size,
                expected: block_size,
            });
        }
        let blocks = wire.engine_hashes.len();
        let tokens = blocks.checked_mul(self.block_size.tokens());
        let tokens = tokens.and_then(|tokens| tokens.checked_add(usize::from(wire.eagle)));
        if tokens != Some(wire.tokens.len()) {
            return Err(Skipped::Counts {
                tokens: wire.tokens.len(),
                blocks,
                block_size,
            });
        }
        Ok(())
    }

    /// Where the event's blocks lie, if they are this rank's and count.
    fn tier(&self, place: &Place<'_>) -> Result<Tier, Skipped> {
        let tier = tier_of(place.medium)?;
        match place.locality {
            None | Some("LOCAL") => {}
            Some(other) => return Err(Skipped::NotLocal(shown(other))),
        }
        owned(place.owner, tier)?;
        self.groups.check(place.group, place.kind)?;
        Ok(tier)
    }
}

/// The tier of a medium's name, by Dynamo's table (`StorageTier::from_kv_medium`).
fn tier_of(medium: Option<&str>) -> Result<Tier, Skipped> {
    match medium {
        None | Some("" | "GPU" | "DEVICE") => Ok(Tier::Device),
        Some("CPU" | "CPU_PINNED" | "CPU_TIER1") => Ok(Tier::Host),
        Some("CPU_TIER2" | "DISK" | "NVME" | "STORAGE") => Ok(Tier::Disk),
        Some(shared @ ("EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED")) => {
            Err(Skipped::SharedStorage(shared.to_owned()))
        }
        Some(unknown) => Err(Skipped::UnknownMedium(shown(unknown))),
    }
}

/// Whether blocks of this owner are the worker's.
fn owned(owner: Option<&str>, tier: Tier) -> Result<(), Skipped> {
    match owner {
        None => Ok(()),
        Some("kvcr") => Err(Skipped::OtherOwner("kvcr".to_owned())),
        Some(unknown) => Err(Skipped::UnknownOwner {
            owner: shown(unknown),
            tier,
        }),
    }
}
