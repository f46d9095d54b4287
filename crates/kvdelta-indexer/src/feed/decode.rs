//! From the bytes that feeds bring to batches of events.

use std::sync::Arc;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::event::{Change, Event};
use crate::ids::{BlockSize, EngineHash, Namespace, WorkerRank};
use crate::index::Index;
use crate::ingest::{Batch, Decode};
use crate::metrics::Counters;
use crate::stream::Digest;
use crate::time::Millis;
use crate::trust::Reason;
use crate::wire::batch::WireBatch;
use crate::wire::dynamo::RouterEvent;
use crate::wire::groups::CacheGroups;
use crate::wire::normalize::{Dialect, Normalizer};
use crate::wire::skipped::Skipped;

/// What carries one number of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A batch of an engine.
    Engine {
        /// Which engine speaks.
        dialect: Dialect,
        /// The batch in msgpack.
        batch: Bytes,
    },
    /// One event of Dynamo's event plane.
    Event(Box<RouterEvent>),
}

/// Decodes what engines and Dynamo's event plane send.
#[derive(Debug)]
pub struct Decoder {
    block_size: BlockSize,
    counters: Arc<Counters>,
    /// By stream and by the rank that its batches name.
    normalizers: FxHashMap<(WorkerRank, WorkerRank), Normalizer>,
}

impl Decoder {
    /// For engines whose blocks have `block_size` tokens. What is skipped is counted in `counters`.
    pub fn new(block_size: BlockSize, counters: Arc<Counters>) -> Self {
        Self {
            block_size,
            counters,
            normalizers: FxHashMap::default(),
        }
    }

    fn batch(
        &mut self,
        stream: WorkerRank,
        dialect: Dialect,
        payload: &[u8],
        index: &Index,
    ) -> Batch {
        let wire = match WireBatch::decode(payload) {
            Ok(wire) => wire,
            Err(error) => {
                tracing::debug!(of = %stream, %error, "batch of KV events not read");
                self.counters.skipped("bad_batch", stream);
                return Batch {
                    of: stream,
                    events: Vec::new(),
                    flaw: Some(Reason::Malformed),
                    made: None,
                };
            }
        };
        let of = WorkerRank {
            worker: stream.worker,
            rank: wire.rank.unwrap_or(stream.rank),
        };
        if index.usage(of).is_none() {
            // Not admitted: whatever a payload names must not be remembered.
            return Batch {
                of,
                events: Vec::new(),
                flaw: None,
                made: millis(wire.sent_at),
            };
        }
        let block_size = self.block_size;
        let fresh = || Normalizer::new(of, block_size, dialect);
        let normalizer = self.normalizers.entry((stream, of)).or_insert_with(fresh);
        let mut batch = Batch {
            of,
            events: Vec::with_capacity(wire.len()),
            flaw: None,
            made: millis(wire.sent_at),
        };
        // A parent may have come in with an event before it in the same batch, which the index does not
        // know yet.
        let mut stored: FxHashMap<EngineHash, Option<Namespace>> = FxHashMap::default();
        for event in wire.events() {
            let normalized = match event {
                Ok(event) => normalizer.normalize(event, |parent| match stored.get(&parent) {
                    Some(namespace) => *namespace,
                    None => index.namespace_of(of, parent),
                }),
                Err(why) => why.into(),
            };
            if let Some(why) = normalized.skipped {
                skip(&self.counters, &mut batch, &why);
            }
            if let Some(event) = normalized.event {
                if let Change::Stored(run) = &event.change {
                    let names = run.blocks.iter().map(|block| block.engine);
                    stored.extend(names.map(|engine| (engine, run.namespace)));
                }
                batch.events.push(event);
            }
        }
        if normalizer.groups() == CacheGroups::Hybrid {
            batch.flaw = Some(Reason::UnknownCacheGroups);
        }
        batch
    }
}

fn skip(counters: &Counters, batch: &mut Batch, why: &Skipped) {
    tracing::debug!(of = %batch.of, %why, "KV event skipped");
    counters.skipped(why.as_label(), batch.of);
    if why.may_hide_changes() {
        batch.flaw = Some(Reason::Malformed);
    }
}

impl Decode for Decoder {
    type Payload = Payload;

    fn digest(&self, payload: &Payload) -> Digest {
        match payload {
            Payload::Engine { batch, .. } => Digest::of(batch),
            Payload::Event(event) => Digest::of(&identity(event)),
        }
    }

    fn bytes(&self, payload: &Payload) -> usize {
        match payload {
            Payload::Engine { batch, .. } => batch.len(),
            Payload::Event(event) => {
                let told = match &event.change {
                    Ok(Change::Stored(run)) => size_of_val(run.blocks.as_slice()),
                    Ok(
                        Change::Placed { engine_hashes, .. }
                        | Change::Removed { engine_hashes, .. },
                    ) => size_of_val(engine_hashes.as_slice()),
                    Ok(Change::Cleared) | Err(_) => 0,
                };
                size_of::<RouterEvent>() + told
            }
        }
    }

    fn decode(&mut self, stream: WorkerRank, payload: &Payload, index: &Index) -> Batch {
        match payload {
            Payload::Engine { dialect, batch } => self.batch(stream, *dialect, batch, index),
            Payload::Event(event) => {
                let mut batch = Batch {
                    of: event.of,
                    events: Vec::new(),
                    flaw: None,
                    made: None,
                };
                match &event.change {
                    Ok(change) => batch.events.push(Event {
                        of: event.of,
                        change: change.clone(),
                    }),
                    Err(why) => skip(&self.counters, &mut batch, why),
                }
                batch
            }
        }
    }

    fn forget(&mut self, stream: WorkerRank) {
        self.normalizers.retain(|(of, _), _| *of != stream);
    }
}

fn millis(seconds: f64) -> Option<Millis> {
    let since = std::time::Duration::try_from_secs_f64(seconds).ok()?;
    u64::try_from(since.as_millis()).ok().map(Millis)
}

/// The same bytes for the same event, however it came.
fn identity(event: &RouterEvent) -> Vec<u8> {
    let mut bytes = event.id.to_le_bytes().to_vec();
    let mut add = |kind: u8, hashes: &mut dyn Iterator<Item = u64>| {
        bytes.push(kind);
        bytes.extend(hashes.flat_map(u64::to_le_bytes));
    };
    match &event.change {
        Ok(Change::Stored(run)) => {
            let parent = run.parent.map(|parent| parent.0);
            let blocks = run
                .blocks
                .iter()
                .flat_map(|run| [run.block.0, run.engine.0]);
            add(run.tier as u8, &mut parent.into_iter().chain(blocks));
        }
        Ok(Change::Placed {
            tier,
            engine_hashes,
        }) => add(
            8 + *tier as u8,
            &mut engine_hashes.iter().map(|hash| hash.0),
        ),
        Ok(Change::Removed {
            tier,
            engine_hashes,
        }) => add(
            16 + *tier as u8,
            &mut engine_hashes.iter().map(|hash| hash.0),
        ),
        Ok(Change::Cleared) => add(24, &mut std::iter::empty()),
        Err(_) => add(32, &mut std::iter::empty()),
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_nobody_admitted_leave_nothing_behind() {
        let block_size = BlockSize::try_from(4).unwrap();
        let index = Index::new(block_size);
        let of = WorkerRank::new(7, 0);
        index.admit(of);
        let mut decoder = Decoder::new(block_size, Arc::default());
        for rank in 0..1000_u32 {
            let events = serde_json::json!([0.0, [], rank]);
            let payload = Payload::Engine {
                dialect: Dialect::Vllm,
                batch: rmp_serde::to_vec(&events).unwrap().into(),
            };
            let batch = decoder.decode(of, &payload, &index);
            assert_eq!(batch.of, WorkerRank::new(7, rank));
        }
        assert_eq!(decoder.normalizers.len(), 1);
    }
}
