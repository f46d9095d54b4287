// SPDX-License-Identifier: Apache-2.0

//! Which workers are followed, as discovery shows them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use kvdelta_indexer::feed::zmq::endpoint_of_rank;
use kvdelta_indexer::{BlockSize, DpRank, WorkerId, WorkerRank};

use crate::doctor::discovery::{self, Entry, Publisher, Wanted};

/// What discovery shows of the workers that are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fleet {
    pub(crate) block_size: BlockSize,
    pub(crate) workers: Workers,
    /// What is left out, and why.
    pub(crate) left_out: Vec<String>,
}

type Workers = BTreeMap<WorkerId, Worker>;

/// One worker with its publishers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Worker {
    pub(crate) name: String,
    pub(crate) ranks: BTreeMap<DpRank, Channel>,
}

/// How a rank's events come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Channel {
    /// From a socket of its publisher.
    Zmq { publisher: u64, endpoint: String },
    /// By a NATS broker.
    Nats { publisher: u64 },
}

impl Fleet {
    /// Reads the workers that are wanted; `component` and `block_size` as options give them.
    ///
    /// # Errors
    /// There is none, or their blocks differ in size.
    pub(crate) fn read(
        entries: &[Entry],
        wanted: &Wanted,
        component: Option<&str>,
        block_size: Option<BlockSize>,
    ) -> Result<Self> {
        let deployment = discovery::deployment(entries, wanted);
        let mut left_out = Vec::new();
        let mut workers = BTreeMap::new();
        let mut sizes = BTreeMap::new();
        let publishers = discovery::publishers(entries);
        for worker in &deployment.workers {
            if component.is_some_and(|component| component != worker.component) {
                continue;
            }
            let name = format!("{}/{:x}", worker.component, worker.instance_id);
            let size = worker.block_size_tokens;
            let size = size.and_then(|size| u32::try_from(size).ok());
            let size = size.and_then(|size| BlockSize::try_from(size).ok());
            if let (Some(wanted), Some(size)) = (block_size, size)
                && wanted != size
            {
                let size = u32::from(size);
                left_out.push(format!("{name}: its blocks have {size} tokens"));
                continue;
            }
            let mut ranks = BTreeMap::new();
            for publisher in &publishers {
                if publisher.worker_id != worker.instance_id {
                    continue;
                }
                match channel(publisher) {
                    Ok(channel) => {
                        ranks.insert(DpRank(publisher.dp_rank), channel);
                    }
                    Err(why) => left_out.push(format!("{name}/{}: {why}", publisher.dp_rank)),
                }
            }
            if ranks.is_empty() {
                left_out.push(format!("{name}: it publishes no KV events"));
                continue;
            }
            if let Some(size) = size {
                sizes.insert(u32::from(size), size);
            }
            workers.insert(WorkerId(worker.instance_id), Worker { name, ranks });
        }
        if workers.is_empty() {
            let why = left_out.join("; ");
            bail!(
                "discovery shows no worker to follow{}{why}",
                if why.is_empty() { "" } else { ": " }
            );
        }
        if sizes.len() > 1 {
            let sizes: Vec<String> = sizes.keys().map(u32::to_string).collect();
            bail!(
                "there are workers with blocks of {} tokens; choose by --block-size, --component or --model",
                sizes.join(" and ")
            );
        }
        let block_size = block_size.or(sizes.into_values().next());
        Ok(Self {
            block_size: block_size.context("no worker tells its block size; give --block-size")?,
            workers,
            left_out,
        })
    }

    /// The workers of `before` that are gone or changed, and those here that are new or changed.
    pub(crate) fn changes(&self, before: Option<&Self>) -> (Vec<WorkerId>, Vec<WorkerId>) {
        let none = Workers::new();
        let before = before.map_or(&none, |before| &before.workers);
        (
            differing(before, &self.workers),
            differing(&self.workers, before),
        )
    }

    /// Whether any events come by NATS.
    pub(crate) fn uses_nats(&self) -> bool {
        let workers = self.workers.values();
        let mut channels = workers.flat_map(|worker| worker.ranks.values());
        channels.any(|channel| matches!(channel, Channel::Nats { .. }))
    }

    /// The ranks that are followed.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        let workers = self.workers.iter();
        workers.flat_map(|(id, worker)| {
            let ranks = worker.ranks.keys();
            ranks.map(|rank| WorkerRank {
                worker: *id,
                rank: *rank,
            })
        })
    }
}

/// Those of `these` that are not the same among `those`.
fn differing(these: &Workers, those: &Workers) -> Vec<WorkerId> {
    let these = these.iter();
    let differing = these.filter(|(id, worker)| those.get(id) != Some(worker));
    differing.map(|(id, _)| *id).collect()
}

fn channel(publisher: &Publisher) -> Result<Channel, String> {
    match (publisher.transport.as_deref(), &publisher.endpoint) {
        (Some("Nats"), _) => Ok(Channel::Nats {
            publisher: publisher.id,
        }),
        (Some("Zmq"), Some(endpoint)) => match endpoint_of_rank(endpoint, 0) {
            Ok(endpoint) => Ok(Channel::Zmq {
                publisher: publisher.id,
                endpoint,
            }),
            Err(error) => Err(error.to_string()),
        },
        (Some(other), _) => Err(format!("a transport that is not spoken here: {other}")),
        (None, _) => Err("its publisher has not registered where it publishes".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::SystemTime;

    use super::*;
    use crate::doctor::files;
    use serde_json::{Value, json};

    fn entry(value: Value) -> Entry {
        Entry {
            key: "key".to_owned(),
            value: value.to_string().into_bytes(),
            age_seconds: None,
        }
    }

    fn worker(id: u64, component: &str, block_size: u32) -> Entry {
        entry(json!({
            "type": "Model", "namespace": "dynamo", "component": component, "endpoint": "generate",
            "instance_id": id,
            "card_json": {"display_name": "m", "kv_cache_block_size": block_size},
        }))
    }

    fn publisher(id: u64, worker: u64, rank: u32, transport: Value) -> [Entry; 2] {
        [
            entry(json!({
                "type": "EventSource", "topic": "kv-events", "publisher_id": id,
                "scope": {"kind": "endpoint", "endpoint": {
                    "namespace": "dynamo", "component": "backend", "name": "generate",
                }},
                "metadata": {"worker": {"worker_id": worker, "dp_rank": rank}},
            })),
            entry(json!({
                "type": "EventChannel", "topic": "kv-events", "instance_id": id,
                "transport": transport,
            })),
        ]
    }

    fn zmq(endpoint: &str) -> Value {
        json!({"kind": "Zmq", "config": {"endpoint": endpoint}})
    }

    fn read(entries: &[Entry], component: Option<&str>, size: Option<u32>) -> Result<Fleet> {
        let size = size.map(|size| BlockSize::try_from(size).unwrap());
        Fleet::read(entries, &Wanted::default(), component, size)
    }

    #[test]
    fn ranks_are_found_where_their_publishers_are() {
        let nats = json!({"kind": "Nats", "config": {"subject_prefix": "a"}});
        let broker = json!({"kind": "ZmqBroker", "config": {"xsub_endpoints": []}});
        let mut entries = vec![worker(10, "backend", 32), worker(11, "backend", 32)];
        entries.push(worker(12, "prefill", 32));
        entries.extend(publisher(1, 10, 0, zmq("tcp://10.0.0.1:7000")));
        entries.extend(publisher(2, 10, 1, nats));
        entries.extend(publisher(3, 11, 0, broker));
        entries.extend(publisher(4, 12, 0, zmq("tcp://10.0.0.2:7000")));
        let fleet = read(&entries, Some("backend"), None).unwrap();
        assert_eq!(u32::from(fleet.block_size), 32);
        let expected = [WorkerRank::new(10, 0), WorkerRank::new(10, 1)];
        assert_eq!(fleet.ranks().collect::<Vec<_>>(), expected);
        let found = &fleet.workers[&WorkerId(10)];
        assert_eq!(found.name, "backend/a");
        let zmq = Channel::Zmq {
            publisher: 1,
            endpoint: "tcp://10.0.0.1:7000".to_owned(),
        };
        assert_eq!(found.ranks[&DpRank(0)], zmq);
        assert_eq!(found.ranks[&DpRank(1)], Channel::Nats { publisher: 2 });
        assert!(fleet.uses_nats());
        assert_eq!(
            fleet.left_out,
            [
                "backend/b/0: a transport that is not spoken here: ZmqBroker",
                "backend/b: it publishes no KV events",
            ]
        );
    }

    #[test]
    fn a_recorded_deployment_is_followed_whole() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = folder.join("tests/fixtures/doctor/unpatched/discovery");
        // Before the files were written, so that none is too old.
        let entries = files::read(&folder, SystemTime::UNIX_EPOCH).unwrap();
        let all = read(&entries, None, None).unwrap();
        assert_eq!(u32::from(all.block_size), 32);
        assert_eq!(all.ranks().count(), 3);
        assert!(all.left_out.is_empty(), "{:?}", all.left_out);
        let decode = read(&entries, Some("backend"), None).unwrap();
        let names: Vec<_> = decode.workers.values().map(|worker| &worker.name).collect();
        assert_eq!(
            names,
            ["backend/3ba2b21a7a5d689b", "backend/412ac5f7ff96b642"]
        );
        let channel = Channel::Zmq {
            publisher: 0x14_f8dc_c7fc_4674,
            endpoint: "tcp://192.0.2.2:38243".to_owned(),
        };
        assert_eq!(
            decode.workers[&WorkerId(0x3ba2_b21a_7a5d_689b)].ranks[&DpRank(0)],
            channel
        );
    }

    #[test]
    fn a_worker_that_changed_is_gone_and_new() {
        let fleet = |publishers: &[(u64, &str)]| {
            let mut entries = Vec::new();
            for (id, endpoint) in publishers {
                entries.push(worker(*id, "backend", 32));
                entries.extend(publisher(*id, *id, 0, zmq(endpoint)));
            }
            read(&entries, None, None).unwrap()
        };
        let before = fleet(&[(1, "tcp://a:1"), (2, "tcp://a:2"), (3, "tcp://a:3")]);
        let now = fleet(&[(1, "tcp://a:1"), (2, "tcp://b:2"), (4, "tcp://a:4")]);
        let ids = |ids: &[u64]| ids.iter().map(|id| WorkerId(*id)).collect::<Vec<_>>();
        assert_eq!(before.changes(None), (ids(&[]), ids(&[1, 2, 3])));
        assert_eq!(now.changes(Some(&before)), (ids(&[2, 3]), ids(&[2, 4])));
        assert_eq!(now.changes(Some(&now)), (ids(&[]), ids(&[])));
    }

    #[test]
    fn blocks_of_two_sizes_are_a_choice_to_make() {
        let mut entries = vec![worker(10, "backend", 32), worker(11, "prefill", 16)];
        entries.extend(publisher(1, 10, 0, zmq("tcp://10.0.0.1:7000")));
        entries.extend(publisher(2, 11, 0, zmq("tcp://10.0.0.1:7001")));
        let error = read(&entries, None, None).unwrap_err().to_string();
        assert!(error.contains("16 and 32 tokens"), "{error}");
        let fleet = read(&entries, None, Some(16)).unwrap();
        assert_eq!(fleet.ranks().collect::<Vec<_>>(), [WorkerRank::new(11, 0)]);
        assert_eq!(fleet.left_out, ["backend/a: its blocks have 32 tokens"]);
        let error = read(&[], None, None).unwrap_err().to_string();
        assert_eq!(error, "discovery shows no worker to follow");
    }
}
