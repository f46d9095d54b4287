//! The oracle: the same answers from maps of whole paths, slowly.

use std::collections::BTreeMap;

use crate::event::{Change, Copies, Event, Stored};
use crate::ids::{BlockHash, EngineHash, Namespace, Tier, WorkerRank};
use crate::index::{Applied, Held, Overlap, Refused};

/// What each admitted rank holds, by whole path from position 0.
#[derive(Debug, Default)]
pub struct Naive {
    ranks: BTreeMap<WorkerRank, BTreeMap<Vec<BlockHash>, Entry>>,
}

#[derive(Clone, Debug)]
struct Entry {
    engine: EngineHash,
    namespace: Option<Namespace>,
    copies: [u32; Tier::ALL.len()],
}

impl Entry {
    fn is_held(&self) -> bool {
        self.copies.iter().any(|copies| *copies > 0)
    }
}

impl Naive {
    /// See `Index::admit`.
    pub fn admit(&mut self, of: WorkerRank) {
        self.ranks.entry(of).or_default();
    }

    /// See `Index::remove_rank`.
    pub fn remove_rank(&mut self, of: WorkerRank) -> bool {
        self.ranks.remove(&of).is_some()
    }

    /// See `Index::apply`.
    pub fn apply(&mut self, event: &Event) -> Applied {
        let Some(held) = self.ranks.get_mut(&event.of) else {
            return Applied::refused(Refused::NotAdmitted);
        };
        match &event.change {
            Change::Stored(stored) => store(held, stored),
            Change::Placed {
                tier,
                engine_hashes,
            } => {
                let mut applied = Applied::default();
                for engine in engine_hashes {
                    let mut known = false;
                    for entry in held.values_mut().filter(|entry| entry.engine == *engine) {
                        known = true;
                        let copies = &mut entry.copies[*tier as usize];
                        applied.count_stored(*copies == 0);
                        *copies = (*copies).max(1);
                    }
                    applied.unknown_blocks += u64::from(!known);
                }
                applied
            }
            Change::Removed {
                tier,
                engine_hashes,
            } => {
                let mut applied = Applied::default();
                for engine in engine_hashes {
                    let mut known = false;
                    for entry in held.values_mut().filter(|entry| entry.engine == *engine) {
                        let copies = &mut entry.copies[*tier as usize];
                        if *copies > 0 {
                            known = true;
                            *copies -= 1;
                            applied.removed_blocks += u64::from(*copies == 0);
                        }
                    }
                    applied.unknown_blocks += u64::from(!known);
                }
                held.retain(|_, entry| entry.is_held());
                applied
            }
            Change::Cleared => {
                let removed = held.values().flat_map(|entry| entry.copies);
                let removed_blocks = removed.map(|copies| u64::from(copies > 0)).sum();
                held.clear();
                Applied {
                    removed_blocks,
                    ..Applied::default()
                }
            }
        }
    }

    /// See `Index::namespace_of`.
    pub fn namespace_of(&self, of: WorkerRank, engine: EngineHash) -> Option<Namespace> {
        let mut found = self.ranks.get(&of)?.values().filter(|e| e.engine == engine);
        let entry = found.next()?;
        found.next().is_none().then_some(entry.namespace)?
    }

    /// See `Index::overlap_of`.
    pub fn overlap_of(&self, of: WorkerRank, tier: Tier, prompt: &[BlockHash]) -> Option<Overlap> {
        let held = self.ranks.get(&of)?;
        let held = (1..=prompt.len()).map_while(|blocks| {
            let entry = held.get(&prompt[..blocks])?;
            (entry.copies[tier as usize] > 0).then_some(Overlap {
                of,
                tier,
                blocks,
                engine: entry.engine,
            })
        });
        held.last()
    }

    /// See `Index::held`.
    pub fn held(&self, of: WorkerRank) -> Vec<Held> {
        let mut all = Vec::new();
        for (path, entry) in self.ranks.get(&of).into_iter().flatten() {
            for tier in Tier::ALL {
                if entry.copies[tier as usize] > 0 {
                    all.push(Held::new(tier, path, entry.engine));
                }
            }
        }
        all.sort_unstable();
        all
    }
}

fn store(held: &mut BTreeMap<Vec<BlockHash>, Entry>, stored: &Stored) -> Applied {
    if let Some(refused) = Refused::of(stored) {
        return Applied::refused(refused);
    }
    let mut path = match stored.parent {
        None => Vec::new(),
        Some(parent) => {
            let mut found = held.iter().filter(|(_, entry)| entry.engine == parent);
            match (found.next(), found.next()) {
                (None, _) => return Applied::refused(Refused::UnknownParent),
                (Some(_), Some(_)) => return Applied::refused(Refused::AmbiguousParent),
                (Some((path, _)), None) => path.clone(),
            }
        }
    };
    let mut applied = Applied::default();
    for block in &stored.blocks {
        path.push(block.block);
        let entry = held.entry(path.clone()).or_insert(Entry {
            engine: block.engine,
            namespace: stored.namespace,
            copies: [0; Tier::ALL.len()],
        });
        let renamed = entry.engine != block.engine;
        entry.engine = block.engine;
        entry.namespace = entry.namespace.or(stored.namespace);
        let copies = &mut entry.copies[stored.tier as usize];
        applied.count_stored(*copies == 0);
        *copies = match stored.copies {
            Copies::Counted if !renamed => *copies + 1,
            Copies::Counted | Copies::Single => 1,
        };
    }
    applied
}
