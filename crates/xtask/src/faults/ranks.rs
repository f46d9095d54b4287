// SPDX-License-Identifier: Apache-2.0

//! Tensor parallelism: engines of one and of two ranks, of which each reads, checks and tells for its own heads.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use crate::client::Client;
use crate::faults::aggregated;
use crate::faults::check::by_label;
use crate::faults::claims::{Claims, Hashed};
use crate::faults::driver::EPSILON;
use crate::faults::engine::{Engine, Kind, Role, Setup, Spec, settle};
use crate::faults::legs::{Ask, Decoded, LegError, Legs, Prefilled};
use crate::faults::plan::Connector;
use crate::faults::release::prompt;
use crate::outputs::{Reference, Verdict, compare};
use crate::progress::{Step, say};

/// Workers of one rank that take as much memory as all of these.
pub(crate) const WORKERS: usize = 6;
/// Ranks of the prefill workers, and of the decode workers; each of the ones is tried with each of the others.
const RANKS: [usize; 2] = [2, 1];
/// Blocks of a prompt: in all, and of the prefix that decode holds.
const PROMPT_BLOCKS: usize = 16;
const HELD_BLOCKS: usize = 12;
/// The block that decode loses.
const LOST_BLOCK: usize = 8;
/// Blocks of KV of every engine.
const BLOCKS: usize = 256;
const MAX_TOKENS: usize = 640;
const OUTPUT_TOKENS: usize = 12;
/// Offers that a decode worker reads of each prefill worker.
const READS: usize = 3;
/// Counters come with the steps after what they count.
const COUNTED: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(200);

/// A counter of an engine: its name, a label, and the value of that.
type Counter = (&'static str, &'static str, &'static str);

/// The aggregated worker's answers to a prompt and to its prefix.
struct Right {
    prefix: Reference,
    whole: Reference,
}

struct Scene {
    client: Client,
    legs: Legs,
    claims: Claims,
}

/// A prefill and a decode worker, and the prompt that is tried with them.
struct Pair<'a> {
    scene: &'a Scene,
    prefill: &'a Engine,
    decode: &'a Engine,
    number: usize,
}

/// Tries all prefill with all decode workers.
pub(crate) async fn check(setup: &Setup, client: &Client) -> Result<()> {
    let alone = aggregated(setup, client).await?;
    let mut rights = Vec::new();
    for number in 0..RANKS.len() * RANKS.len() {
        let reference = async |blocks| {
            let prompt = prompt(number, blocks);
            client.reference(alone.base(), &prompt, OUTPUT_TOKENS).await
        };
        rights.push(Right {
            prefix: reference(HELD_BLOCKS).await?,
            whole: reference(PROMPT_BLOCKS).await?,
        });
    }
    drop(alone);

    let start = |role, number, ranks| {
        let spec = Spec {
            role,
            number,
            ranks,
            blocks: BLOCKS,
            max_tokens: MAX_TOKENS,
            asks_again: true,
        };
        let kind = Kind {
            connector: Connector::Own,
            lease: None,
        };
        Engine::start(setup, client, spec, kind)
    };
    let all = |role, first: u64| -> Result<Vec<Engine>> {
        let numbered = (first..).zip(RANKS);
        numbered
            .map(|(number, ranks)| start(role, number, ranks))
            .collect()
    };
    let step = Step::begin("engines of one and of two ranks");
    let prefills = all(Role::Prefill, 8)?;
    let decodes = all(Role::Decode, 0)?;
    let engines: Vec<&Engine> = prefills.iter().chain(&decodes).collect();
    for engine in &engines {
        engine.ready().await?;
    }
    step.end();

    let scene = Scene {
        client: client.clone(),
        legs: Legs::new()?,
        claims: Claims::follow(engines.iter().copied())?,
    };
    let pairs = prefills
        .iter()
        .flat_map(|prefill| decodes.iter().map(move |decode| (prefill, decode)));
    for (number, ((prefill, decode), right)) in pairs.zip(&rights).enumerate() {
        let pair = Pair {
            scene: &scene,
            prefill,
            decode,
            number,
        };
        let what = format!("{} to {} ranks", prefill.ranks(), decode.ranks());
        pair.run(right).await.with_context(|| what.clone())?;
        say(format!("{what}: read, cut and asked again"));
    }
    let left = settle(&engines).await?;
    ensure!(left.is_empty(), "{}", left.join(", "));
    for prefill in &prefills {
        scene.counted_prefill(prefill, decodes.len()).await?;
    }
    for decode in &decodes {
        scene.counted_decode(decode, &prefills).await?;
    }
    Ok(())
}

impl Scene {
    async fn counted_prefill(&self, engine: &Engine, pairs: usize) -> Result<()> {
        let wanted = [
            (("claims", "outcome", "skipped"), 2 * pairs),
            (("leases_expired", "engine", "0"), 0),
        ];
        self.counted(engine, &wanted).await
    }

    async fn counted_decode(&self, engine: &Engine, prefills: &[Engine]) -> Result<()> {
        let pairs = prefills.len();
        // The heads are cut as finely as the side with more ranks has them, and each part has a word.
        let parts = prefills
            .iter()
            .map(|prefill| prefill.ranks().max(engine.ranks()));
        let wanted = [
            (("offers", "outcome", "confirmed"), pairs),
            (("offers", "outcome", "stale"), pairs),
            (("offers", "outcome", "whole"), 2 * pairs),
            (("recoveries", "kind", "ask_again"), pairs),
            (
                ("lease_checks", "outcome", "held"),
                READS * parts.sum::<usize>(),
            ),
            (("lease_checks", "outcome", "gone"), 0),
            (("lease_checks", "outcome", "failed"), 0),
        ];
        self.counted(engine, &wanted).await
    }

    /// An error if `engine` does not come to these counts.
    async fn counted(&self, engine: &Engine, wanted: &[(Counter, usize)]) -> Result<()> {
        let deadline = Instant::now() + COUNTED;
        loop {
            engine.nudge().await?;
            let text = self
                .client
                .get(&format!("{}/metrics", engine.base()))
                .await?;
            let wrong: Vec<String> = wanted
                .iter()
                .filter_map(|((name, label, value), count)| {
                    let name = format!("vllm:kvdelta_{name}_total");
                    let found = by_label(&text, &name, label).get(*value).copied();
                    (found != Some(*count as u64))
                        .then(|| format!("{name} {value} is {found:?}, not {count}"))
                })
                .collect();
            if wrong.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{}: {}",
                engine.name,
                wrong.join(", ")
            );
            tokio::time::sleep(POLL).await;
        }
    }
}

impl Pair<'_> {
    async fn run(&self, right: &Right) -> Result<()> {
        let prefix = prompt(self.number, HELD_BLOCKS);
        let first = self.prefill("cold", &prefix, None, None).await?;
        self.answers("cold", &prefix, first, &right.prefix).await?;
        self.holds(&prefix, HELD_BLOCKS).await?;

        let whole = prompt(self.number, PROMPT_BLOCKS);
        let first = self.cut("cut", &whole, HELD_BLOCKS).await?;
        self.answers("cut", &whole, first, &right.whole).await?;
        self.holds(&whole, PROMPT_BLOCKS).await?;

        let first = self.cut("stale", &whole, PROMPT_BLOCKS).await?;
        self.evict(&whole).await?;
        let release = first.request_id().map(str::to_owned);
        match self.decode("stale", &whole, first).await {
            Err(error) if error.is_engines() => {}
            other => bail!("a stale claim ended in {other:?}"),
        }
        let release = release.as_deref();
        let first = self.prefill("again", &whole, None, release).await?;
        self.answers("again", &whole, first, &right.whole).await
    }

    fn id(&self, what: &str) -> String {
        format!("ranks-{}-{what}", self.number)
    }

    async fn prefill(
        &self,
        what: &str,
        prompt: &[u32],
        claim: Option<&Value>,
        release: Option<&str>,
    ) -> Result<Prefilled> {
        let id = self.id(what);
        let legs = &self.scene.legs;
        let prefilled = legs.prefill(self.prefill.base(), ask(&id, prompt), claim, release);
        let prefilled = prefilled.await.with_context(|| id.clone())?;
        let cut = prefilled.cut_for();
        let wanted = claim.map(|_| id.as_str());
        ensure!(cut == wanted, "{id}: the offer was cut for {cut:?}");
        Ok(prefilled)
    }

    /// The prefill leg with the claim that decode holds `blocks` blocks. The offer must be cut and have the word of
    /// every rank.
    async fn cut(&self, what: &str, prompt: &[u32], blocks: usize) -> Result<Prefilled> {
        let id = self.id(what);
        let claim = self.scene.claims.claim(self.decode.of, hashed(prompt), &id);
        let claim = json!(claim.with_context(|| format!("{id}: no claim"))?);
        let first = self.prefill(what, prompt, Some(&claim), None).await?;
        let skipped = first.params.pointer("/kvdelta/first_block");
        let words = first.params.pointer("/kvdelta/lease/tables");
        let words = words.and_then(Value::as_object).map_or(0, Map::len);
        ensure!(
            skipped == Some(&json!(blocks)) && words == self.prefill.ranks(),
            "{id}: not {blocks} blocks are skipped, or not each rank has a word: {}",
            first.params
        );
        Ok(first)
    }

    async fn decode(
        &self,
        what: &str,
        prompt: &[u32],
        first: Prefilled,
    ) -> Result<Decoded, LegError> {
        let id = self.id(what);
        let base = self.decode.base();
        self.scene
            .legs
            .decode(base, ask(&id, prompt), first.params)
            .await
    }

    /// The decode leg, which must bring the right answer.
    async fn answers(
        &self,
        what: &str,
        prompt: &[u32],
        first: Prefilled,
        right: &Reference,
    ) -> Result<()> {
        let id = self.id(what);
        let decoded = self
            .decode(what, prompt, first)
            .await
            .with_context(|| id.clone())?;
        ensure!(decoded.stale.is_none(), "{id}: stale: {:?}", decoded.stale);
        let verdict = compare(right, &decoded.tokens, EPSILON);
        ensure!(
            !matches!(verdict, Verdict::Different { .. }),
            "{id}: the answer is not the aggregated worker's: {verdict:?}"
        );
        Ok(())
    }

    async fn holds(&self, prompt: &[u32], blocks: usize) -> Result<()> {
        let claims = &self.scene.claims;
        ensure!(
            claims.holds(self.decode.of, hashed(prompt), blocks).await,
            "{} does not hold the {blocks} blocks that it has just used",
            self.decode.name
        );
        Ok(())
    }

    async fn evict(&self, prompt: &[u32]) -> Result<()> {
        let lost = LOST_BLOCK..LOST_BLOCK + 1;
        let Scene { claims, legs, .. } = self.scene;
        let hashes = claims.engine_hashes(self.decode.of, hashed(prompt), lost);
        legs.evict(self.decode.base(), &self.id("evict"), &hashes)
            .await?;
        Ok(())
    }
}

fn ask<'a>(id: &'a str, prompt: &'a [u32]) -> Ask<'a> {
    Ask {
        id,
        prompt,
        salt: None,
        output_tokens: OUTPUT_TOKENS,
    }
}

fn hashed(tokens: &[u32]) -> Hashed<'_> {
    Hashed { tokens, salt: None }
}
