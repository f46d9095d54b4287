// SPDX-License-Identifier: Apache-2.0

//! What every router of a fleet has booked, as it tells its replicas.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use dynamo_kv_router::protocols::{
    ActiveSequenceEvent, ActiveSequenceEventBatch, ActiveSequenceEventData,
};
use dynamo_llm::kv_router::ACTIVE_SEQUENCES_SUBJECT;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::DistributedRuntime;
use dynamo_runtime::transports::event_plane::EventSubscriber;
use tokio::sync::watch;

use super::worker::endpoint;

/// A booking: the router, the role, Dynamo's id of the request.
type Key = (u64, &'static str, String);

/// The bookings of all routers.
#[derive(Debug)]
pub(super) struct Ledger {
    state: watch::Receiver<Bookings>,
    _runtime: DistributedRuntime,
}

/// What is booked, and what was.
#[derive(Clone, Debug, Default)]
pub(super) struct Bookings {
    /// Bookings, each with its worker.
    pub(super) open: BTreeMap<Key, u64>,
    /// Pools of each router that something was heard of.
    pub(super) heard: BTreeSet<(u64, &'static str)>,
    /// How many events were heard.
    pub(super) events: usize,
}

impl Bookings {
    fn apply(&mut self, role: WorkerType, event: ActiveSequenceEvent) {
        self.heard.insert((event.router_id, role.as_str()));
        self.events += 1;
        let key = (event.router_id, role.as_str(), event.request_id);
        match event.data {
            ActiveSequenceEventData::AddRequest { .. } => {
                self.open.insert(key, event.worker.worker_id);
            }
            ActiveSequenceEventData::Free => {
                self.open.remove(&key);
            }
            ActiveSequenceEventData::MarkPrefillCompleted => {}
        }
    }
}

impl Ledger {
    /// Listens as another router would.
    pub(super) async fn listen(runtime: DistributedRuntime, namespace: &str) -> Result<Self> {
        let (heard, state) = watch::channel(Bookings::default());
        for role in [WorkerType::Prefill, WorkerType::Decode] {
            let endpoint = endpoint(&runtime, namespace, role)?;
            let mut batches = EventSubscriber::for_endpoint(&endpoint, ACTIVE_SEQUENCES_SUBJECT)
                .await?
                .typed::<ActiveSequenceEventBatch>();
            let heard = heard.clone();
            tokio::spawn(async move {
                while let Some(Ok((_, batch))) = batches.next().await {
                    heard.send_modify(|bookings| {
                        for event in batch.events {
                            bookings.apply(role, event);
                        }
                    });
                }
            });
        }
        Ok(Self {
            state,
            _runtime: runtime,
        })
    }

    /// What is booked now.
    pub(super) fn bookings(&self) -> Bookings {
        self.state.borrow().clone()
    }
}
