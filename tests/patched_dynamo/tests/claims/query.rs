// SPDX-License-Identifier: Apache-2.0

//! A query changes nothing, until the claim that comes of it books its worker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dynamo_kv_router::config::RouterConfigOverride;
use dynamo_kv_router::protocols::{
    DecodeOverlap, RouterRequest, RouterResponse, RoutingConstraints, WorkerWithDpRank,
};
use dynamo_llm::kv_router::{FindBestMatchOutcome, KvRouter};
use dynamo_runtime::pipeline::{AsyncEngine, SingleIn};
use futures::StreamExt;

use crate::fleet::{Ask, Builder, Fleet, Gate, Script, Sent, Spec, Trace, prompt, run, until};
use crate::scene::{BLOCK, at_rest, hold};

const FLEETS: u64 = 10;
const ROUNDS: usize = 3;
const PREFIX: usize = 12;

/// What a query must leave as it is.
#[derive(Debug, PartialEq)]
struct State {
    /// Blocks, prompt tokens and requests of each rank.
    loads: BTreeMap<(u64, u32), (usize, usize, usize)>,
    queue: (usize, usize),
    index: Vec<String>,
    bookings: (usize, BTreeMap<String, u64>, BTreeSet<u64>),
    gauges: Vec<String>,
}

/// A fleet with some load, as a router without a frontend sees it.
struct Observed {
    fleet: Fleet,
    router: Arc<KvRouter>,
    router_id: u64,
    weight: f64,
    prefixes: Vec<Vec<u32>>,
}

fn as_decode() -> RouterConfigOverride {
    RouterConfigOverride {
        overlap_score_credit: Some(0.0),
        assume_kv_reuse: Some(false),
        track_prefill_tokens: Some(false),
        ..RouterConfigOverride::default()
    }
}

impl Observed {
    async fn start(trace: &Trace, random: &mut fastrand::Rng) -> Result<Self> {
        let weight = [0.5, 1.0, 2.0, 4.0][random.usize(0..4)];
        let ranks = random.u32(1..3);
        let spec = |spec: Spec| Spec { ranks, ..spec };
        let mut builder = Builder::new(weight)?
            .prefill(1, Spec::cuts())
            .decode(random.usize(1..4), spec(Spec::claims()));
        if random.bool() {
            builder = builder.decode(1, spec(Spec::default()));
        }
        let fleet = builder.start(trace).await?;
        let (router_id, router) = fleet.observer().await?;
        let prefixes: Vec<_> = (0..3)
            .map(|_| prompt(random.u64(..), PREFIX * BLOCK))
            .collect();
        let mut held = BTreeMap::new();
        for worker in &fleet.decode {
            for rank in 0..ranks {
                for (number, prefix) in prefixes.iter().enumerate() {
                    let blocks = random.usize(0..=PREFIX);
                    if blocks > 0 && random.bool() {
                        hold(worker, rank as usize, &prefix[..blocks * BLOCK])?;
                        held.insert((worker.id, rank, number), blocks);
                    }
                }
            }
        }
        let observed = Self {
            fleet,
            router,
            router_id,
            weight,
            prefixes,
        };
        observed.heard().await?;
        // Both routers know what each rank holds.
        for (number, prefix) in observed.prefixes.iter().enumerate() {
            let asked = longer(prefix, 0);
            until("the index is complete", async || {
                for overlap in observed.overlaps(&asked).await? {
                    let of = (overlap.worker_id, overlap.dp_rank, number);
                    let blocks = held.get(&of).copied().unwrap_or(0);
                    if overlap.cached_prefix_blocks as usize != blocks || !overlap.is_complete {
                        return Ok(Err(format!("{overlap:?}, not {blocks}")));
                    }
                }
                Ok(Ok(()))
            })
            .await?;
            for worker in &observed.fleet.decode {
                for rank in 0..ranks {
                    let blocks = held.get(&(worker.id, rank, number)).copied().unwrap_or(0);
                    observed
                        .fleet
                        .holds(0, worker, rank, prefix, blocks)
                        .await?;
                }
            }
        }
        Ok(observed)
    }

    async fn overlaps(&self, asked: &[u32]) -> Result<Vec<DecodeOverlap>> {
        let overlaps = self.router.get_decode_overlaps(asked, None, None, None);
        let mut overlaps = overlaps.await?;
        overlaps.sort_by_key(|overlap| (overlap.worker_id, overlap.dp_rank));
        Ok(overlaps)
    }

    /// The same, as a router outside asks.
    async fn overlaps_outside(&self, asked: &[u32]) -> Result<Vec<DecodeOverlap>> {
        let request = RouterRequest::DecodeOverlaps {
            tokens: asked.to_vec(),
            block_mm_infos: None,
            lora_name: None,
            cache_namespace: None,
        };
        let mut answer = self.router.generate(SingleIn::new(request)).await?;
        let answer = answer.next().await.context("no answer")?.data;
        let Some(RouterResponse::DecodeOverlaps { mut overlaps }) = answer else {
            anyhow::bail!("another answer");
        };
        overlaps.sort_by_key(|overlap| (overlap.worker_id, overlap.dp_rank));
        Ok(overlaps)
    }

    async fn loads(&self, asked: &[u32]) -> Result<BTreeMap<(u64, u32), (usize, usize, usize)>> {
        let loads = self
            .router
            .get_potential_loads(asked, Some(&as_decode()), None, None, None)
            .await?;
        let each = loads.into_iter().map(|load| {
            let (blocks, tokens) = (load.potential_decode_blocks, load.potential_prefill_tokens);
            (
                (load.worker_id, load.dp_rank),
                (blocks, tokens, load.active_requests),
            )
        });
        Ok(each.collect())
    }

    async fn state(&self, asked: &[u32]) -> Result<State> {
        let mut index: Vec<_> = self
            .router
            .dump_events()
            .await?
            .iter()
            .map(|event| {
                format!(
                    "{} {} {:?}",
                    event.worker_id, event.event.dp_rank, event.event.data
                )
            })
            .collect();
        index.sort();
        Ok(State {
            loads: self.loads(asked).await?,
            queue: (
                self.router.pending_count(),
                self.router.pending_isl_tokens(),
            ),
            index,
            bookings: self.fleet.heard()?,
            gauges: self.fleet.gauges().await?,
        })
    }

    /// The ranks that cost least, by what the router says of loads and overlaps.
    async fn cheapest(&self, asked: &[u32]) -> Result<BTreeSet<(u64, u32)>> {
        let loads = self.loads(asked).await?;
        let costs: Vec<_> = self
            .overlaps(asked)
            .await?
            .into_iter()
            .map(|overlap| {
                let rank = (overlap.worker_id, overlap.dp_rank);
                let load = loads.get(&rank).map_or(0, |(blocks, ..)| *blocks);
                let overlap = f64::from(overlap.cached_prefix_blocks);
                (rank, load as f64 - self.weight * overlap)
            })
            .collect();
        let least = costs
            .iter()
            .map(|(_, cost)| *cost)
            .fold(f64::INFINITY, f64::min);
        let cheapest = costs.into_iter().filter(|(_, cost)| *cost <= least + 1e-9);
        Ok(cheapest.map(|(rank, _)| rank).collect())
    }

    /// The rank that a selection takes which books nothing.
    async fn choice(&self, asked: &[u32]) -> Result<(u64, u32)> {
        let outcome = self
            .router
            .find_best_match_details_with_policy_class(
                None,
                asked,
                None,
                Some(&as_decode()),
                false,
                false,
                None,
                None,
                0.0,
                0,
                None,
                None,
                None,
                None,
                None,
                RoutingConstraints::default(),
            )
            .await?;
        match outcome {
            FindBestMatchOutcome::Routed {
                worker: WorkerWithDpRank { worker_id, dp_rank },
                ..
            } => Ok((worker_id, dp_rank)),
            FindBestMatchOutcome::QueueRejected { .. } => anyhow::bail!("queue rejected"),
        }
    }

    /// As many requests that run at decode workers until the gate opens.
    async fn load(&self, gate: &Gate, random: &mut fastrand::Rng) -> Result<Vec<Sent>> {
        let requests = random.usize(0..5);
        for worker in &self.fleet.decode {
            worker.always(Script::slow(gate));
        }
        let sent = (0..requests).map(|_| {
            let asked = prompt(random.u64(..), random.usize(1..40) * BLOCK);
            self.fleet.send(Ask::new(&asked))
        });
        let sent = sent.collect::<Result<Vec<_>>>()?;
        gate.reached_by(requests).await?;
        self.active(requests).await?;
        Ok(sent)
    }

    /// Waits until the router hears what the frontend books: it misses what was before it listened.
    async fn heard(&self) -> Result<()> {
        until("the frontend's bookings are heard", async || {
            let gate = Gate::closed();
            for worker in &self.fleet.decode {
                worker.always(Script::slow(&gate));
            }
            let sent = self.fleet.send(Ask::new(&prompt(1, BLOCK)))?;
            gate.reached_by(1).await?;
            let mut active = 0;
            for _ in 0..20 {
                active = self.loads(&[]).await?.values().map(|load| load.2).sum();
                if active == 1 {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            gate.open();
            sent.answer().await?.complete()?;
            Ok((active == 1).then_some(()).ok_or_else(String::new))
        })
        .await?;
        self.active(0).await
    }

    /// Waits until the router knows of as many running requests, and prefill has none.
    async fn active(&self, requests: usize) -> Result<()> {
        until("the other router knows what runs", async || {
            let loads = self.loads(&[]).await?;
            let active: usize = loads.values().map(|(_, _, active)| active).sum();
            let open = self.fleet.heard()?.1;
            let of_decode = open.keys().filter(|key| key.contains(" decode ")).count();
            Ok(if [active, open.len(), of_decode] == [requests; 3] {
                Ok(())
            } else {
                Err(format!("{active} active, booked {open:?}, {requests} run"))
            })
        })
        .await
    }
}

fn longer(prefix: &[u32], seed: u64) -> Vec<u32> {
    let mut asked = prefix.to_vec();
    asked.extend(prompt(500 + seed, 3 * BLOCK));
    asked
}

/// Queries of a router, in process and as one outside asks.
async fn query(observed: &Observed, asked: &[u32]) -> Result<()> {
    // What prefill booked and freed for those that run may be heard after they decode.
    let mut last = None;
    until("no more bookings are heard", async || {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let events = observed.fleet.heard()?.0;
        let before = last.replace(events);
        Ok((before == Some(events))
            .then_some(())
            .ok_or_else(|| format!("{events} events")))
    })
    .await?;
    let before = observed.state(asked).await?;
    let overlaps = observed.overlaps(asked).await?;
    let cheapest = observed.cheapest(asked).await?;
    ensure!(observed.overlaps(asked).await? == overlaps);
    ensure!(observed.overlaps_outside(asked).await? == overlaps);
    for _ in 0..5 {
        let choice = observed.choice(asked).await?;
        ensure!(
            cheapest.contains(&choice),
            "{choice:?} is not of {cheapest:?}"
        );
    }
    let ask = || Ask::new(asked).query_only();
    for _ in 0..2 {
        let answer = observed.fleet.ask(ask()).await?;
        ensure!(answer.status == 200, "{}", answer.body);
    }
    ensure!(observed.cheapest(asked).await? == cheapest);
    let after = observed.state(asked).await?;
    ensure!(after == before, "{before:#?}\nbecame\n{after:#?}");
    Ok(())
}

/// A request that waits in prefill: its worker is booked if there is a claim, and nothing else is.
/// Whether there was one.
async fn claim(observed: &Observed, asked: &[u32]) -> Result<bool> {
    let fleet = &observed.fleet;
    let before = observed.state(asked).await?;
    let cheapest = observed.cheapest(asked).await?;
    let gate = Gate::closed();
    fleet.prefill[0].next(Script::slow(&gate));
    let sent = fleet.send(Ask::new(asked))?;
    gate.reached_by(1).await?;
    let told = fleet.prefill[0].received();
    let told = told.last().context("prefill got nothing")?;
    let claimed = told
        .claimed("decode_worker_id")
        .zip(told.claimed("decode_dp_rank"));
    let bookings = before.bookings.1.len() + 1 + usize::from(claimed.is_some());
    until("the claim is booked", async || {
        let open = fleet.heard()?.1;
        Ok(if open.len() == bookings {
            Ok(())
        } else {
            Err(format!("{open:?}"))
        })
    })
    .await?;
    let mut expected = before.loads.clone();
    if let Some((worker, rank)) = claimed {
        let rank = (worker, u32::try_from(rank)?);
        ensure!(cheapest.contains(&rank), "{rank:?} is not of {cheapest:?}");
        let overlaps = observed.overlaps(asked).await?;
        let overlap = overlaps
            .iter()
            .find(|overlap| (overlap.worker_id, overlap.dp_rank) == rank)
            .context("no overlap of the claim's rank")?;
        let blocks = told.claimed("cached_prefix_blocks");
        ensure!(blocks == Some(u64::from(overlap.cached_prefix_blocks)));
        ensure!(told.claimed("prefix_hash") == overlap.prefix_hash.map(|hash| hash.0));
        let load = expected
            .get_mut(&rank)
            .context("no load of the claim's rank")?;
        load.0 += asked.len() / BLOCK;
        load.2 += 1;
    }
    let what = format!("what runs is as before, but for the claim of {claimed:?}");
    until(&what, async || {
        let loads = observed.loads(asked).await?;
        Ok(if loads == expected {
            Ok(())
        } else {
            Err(format!("{loads:?}, not {expected:?}"))
        })
    })
    .await?;
    ensure!(observed.state(asked).await?.index == before.index);
    gate.open();
    let decode = until("the decode leg came", async || {
        let worker = fleet.worker_of(dynamo_llm::worker_type::WorkerType::Decode, &told.id);
        Ok(worker.map(|worker| worker.id).ok_or_else(String::new))
    })
    .await?;
    if let Some((worker, _)) = claimed {
        ensure!(decode == worker, "the leg went elsewhere");
    }
    drop(sent);
    Ok(claimed.is_some())
}

#[test]
fn a_query_changes_nothing_until_its_claim_books() -> Result<()> {
    let mut claims = 0;
    for seed in 0..FLEETS {
        run(async |trace| {
            let random = &mut fastrand::Rng::with_seed(seed);
            let observed = Observed::start(&trace, random).await?;
            for round in 0..ROUNDS {
                let gate = Gate::closed();
                let running = observed.load(&gate, random).await?;
                let asked = match random.usize(0..5) {
                    place if place < observed.prefixes.len() => {
                        longer(&observed.prefixes[place], random.u64(0..9))
                    }
                    _ => prompt(random.u64(..), random.usize(2..30) * BLOCK),
                };
                query(&observed, &asked).await?;
                claims += usize::from(claim(&observed, &asked).await?);
                gate.open();
                for sent in running {
                    sent.answer().await?.complete()?;
                }
                observed
                    .active(0)
                    .await
                    .with_context(|| format!("seed {seed}, round {round}"))?;
                at_rest(&observed.fleet).await?;
            }
            // It asked, and booked nothing ever.
            let routers = observed.fleet.heard()?.2;
            ensure!(
                !routers.contains(&observed.router_id),
                "the observer booked"
            );
            Ok(())
        })
        .with_context(|| format!("seed {seed}"))?;
    }
    let rounds = FLEETS as usize * ROUNDS;
    ensure!(
        (5..rounds - 5).contains(&claims),
        "{claims} claims in {rounds} rounds"
    );
    Ok(())
}
