// SPDX-License-Identifier: Apache-2.0

//! Claims as they arrive in real engines.
//!
//! One prefill and two decode workers with the patched `dynamo.vllm`, whose connector is the stock one that
//! also writes down the claims that reach it (`tests/engines/claim_recorder.py`). Every claim must name the
//! worker that then decodes, the blocks that it holds, and the hash that the prefill engine itself has of the
//! last of them.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::try_join_all;
use kvdelta_indexer::{DpRank, EngineHash};
use kvdelta_protocol::{CAPABILITY_KEY, CacheGroup, Capability, DecodeCacheInfo, VERSION};
use serde::Deserialize;

use crate::cache::Cache;
use crate::client::Client;
use crate::env;
use crate::fleet::{
    self, Aggregated, BLOCK_SIZE, Connector, DISCOVERY, EngineSetup, Fleet, MODEL, Parts, Workers,
};
use crate::frontend;
use crate::interrupt;
use crate::outputs::{Verdict, compare};
use crate::progress::say;
use crate::report::Routing;
use crate::workers;

/// Blocks of each engine's KV cache, and bytes of one block of the test model.
const CACHE_BLOCKS: usize = 160;
const BLOCK_BYTES: usize = 128 << 10;
/// Tokens of an answer.
const OUTPUT_TOKENS: usize = 32;
/// Log-probability margin below which two tokens count as tied.
const EPSILON: f64 = 0.001;
/// An engine's events are on their way a little longer than its answer.
const EVENTS_ARRIVE: Duration = Duration::from_secs(1);
const DECODE_WORKERS: usize = 2;

/// The part of `cargo xtask test`.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let python = env::engines(cache)?;
    let parts = Parts {
        model: env::model(cache, &python)?,
        frontend: frontend::build(cache, frontend::Profile::Dev)?,
        workers: Workers::Patched(workers::overlay(cache, &python)?.context(workers::NONE)?),
        engines: EngineSetup {
            options: vec![
                format!("--kv-cache-memory-bytes={}", CACHE_BLOCKS * BLOCK_BYTES),
                "--max-model-len=1024".to_owned(),
            ],
            prefill: Connector::Recorder,
            decode: Connector::Recorder,
            ..EngineSetup::default()
        },
        python,
    };
    // The aggregated worker stays beside them: a turn contains the answer to the one before.
    fleet::check_memory(2 + DECODE_WORKERS)?;
    interrupt::run(cache, "live-claims", async |folder| {
        scenarios(&parts, folder).await
    })
}

async fn scenarios(parts: &Parts, folder: &Path) -> Result<()> {
    let mut live = Live::start(parts, folder).await?;
    live.route(0.0).await?;
    live.advertised(&folder.join(DISCOVERY))?;
    let first = prompt(0, 647);
    for what in ["weight 0, cold", "weight 0, warm"] {
        live.expect(what, &first, None).await?;
    }

    live.route(2.0).await?;
    let document = prompt(1, 647);
    live.expect("cold", &document, None).await?;
    let warm = live.expect("warm", &document, Some(20)).await?;
    // The last token is computed always, so that block which holds it is not claimed.
    live.expect("warm to the last token", &document[..640], Some(19))
        .await?;

    // Tails behind the first 10 blocks go through the whole cache and push the document's others out.
    let tail_blocks = 10;
    for number in 0..CACHE_BLOCKS / tail_blocks + 3 {
        let mut tokens = document[..10 * BLOCK_SIZE].to_vec();
        tokens.extend(prompt(100 + number, tail_blocks * BLOCK_SIZE + 3));
        let seen = live.expect("shared prefix", &tokens, Some(10)).await?;
        ensure!(
            seen.decode == warm.decode,
            "a prefix of decode worker {} went to {}",
            warm.decode,
            seen.decode
        );
    }
    live.expect("partly evicted", &document, Some(10)).await?;

    // Every block of a conversation was computed but that of the last answer's last token.
    let mut conversation = prompt(2, 651);
    let mut cached = None;
    for turn in 1..=3 {
        let seen = live
            .expect(&format!("turn {turn}"), &conversation, cached)
            .await?;
        cached = Some((conversation.len() + OUTPUT_TOKENS - 1) / BLOCK_SIZE);
        conversation.extend(seen.answer);
        conversation.extend(prompt(10 + turn, 60));
    }

    // At once, so that load brings some to either worker.
    let prompts: Vec<Vec<u32>> = (0..4)
        .map(|index| prompt(30 + index, 660 + index))
        .collect();
    let homes = live.at_once(&prompts).await?;
    ensure!(
        homes.iter().collect::<HashSet<_>>().len() == DECODE_WORKERS,
        "four cold prompts at once went to decode workers {homes:?}"
    );
    for (prompt, home) in prompts.iter().zip(homes) {
        let seen = live
            .expect("warm on either worker", prompt, Some(20))
            .await?;
        ensure!(
            seen.decode == home,
            "a prompt of decode worker {home} went to {}",
            seen.decode
        );
    }
    live.ids_are_unique()
}

/// Prompt `number`, of blocks that no other has.
fn prompt(number: usize, tokens: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(number as u64);
    (0..tokens).map(|_| random.u32(100..4000)).collect()
}

/// A line of the recorder.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(rename = "request_id")]
    _request_id: String,
    is_prefill: bool,
    prompt_tokens: usize,
    /// `Some(None)` is a field with null.
    #[serde(default, deserialize_with = "present")]
    claim: Option<Option<DecodeCacheInfo>>,
    own_hashes: Vec<EngineHash>,
}

fn present<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(deserializer).map(Some)
}

/// The lines of one worker, of which some were read.
#[derive(Debug)]
struct Records {
    file: PathBuf,
    read: usize,
}

impl Records {
    fn new_lines(&mut self) -> Result<Vec<Line>> {
        // There is no file before the first request.
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let lines: Vec<Line> = text
            .lines()
            .skip(self.read)
            .map(|line| serde_json::from_str(line).with_context(|| format!("recorded {line}")))
            .collect::<Result<_>>()?;
        self.read += lines.len();
        Ok(lines)
    }
}

/// What one request showed.
#[derive(Debug)]
struct Seen {
    /// Number of the decode worker that had it.
    decode: usize,
    answer: Vec<u32>,
}

struct Live {
    client: Client,
    aggregated: Aggregated,
    fleet: Fleet,
    prefill: Records,
    decode: Vec<Records>,
    /// Instance ids of the decode workers, in their order.
    ids: Vec<u64>,
    claim_ids: Vec<String>,
}

impl Live {
    async fn start(parts: &Parts, folder: &Path) -> Result<Self> {
        let client = Client::new(MODEL)?;
        let fleet = Fleet::start(parts, folder, &client, 1, DECODE_WORKERS)?;
        let aggregated = Aggregated::start(parts, folder, &client).await?;
        let [prefill, decode] = fleet.claim_records().map(|files| {
            let records = files.into_iter().map(|file| Records { file, read: 0 });
            records.collect::<Vec<_>>()
        });
        let prefill = prefill.into_iter().next().context("one prefill worker")?;
        Ok(Self {
            client,
            aggregated,
            fleet,
            prefill,
            decode,
            ids: Vec::new(),
            claim_ids: Vec::new(),
        })
    }

    /// Puts a frontend with this weight before the workers.
    async fn route(&mut self, weight: f64) -> Result<()> {
        self.fleet.stop_frontend();
        let routing = Routing {
            weight,
            conditional_disagg: false,
        };
        self.fleet.start_frontend(routing, None).await?;
        tokio::time::sleep(EVENTS_ARRIVE).await;
        Ok(())
    }

    /// Reads the workers' cards: ids, and that decode workers advertise the capability and no other does.
    fn advertised(&mut self, discovery: &Path) -> Result<()> {
        let expected = Capability {
            version: VERSION,
            block_size: u32::try_from(BLOCK_SIZE)?.try_into()?,
            prefix_caching: true,
            cache_groups: vec![CacheGroup::FullAttention],
            lower_tiers: false,
        };
        let mut ids = vec![None; DECODE_WORKERS];
        for card in cards(discovery)? {
            let Some(data) = card.runtime_data.get(CAPABILITY_KEY) else {
                ensure!(
                    card.component != "backend",
                    "decode worker {} advertises nothing",
                    card.id
                );
                continue;
            };
            ensure!(
                card.component == "backend",
                "{} worker {} advertises {data}",
                card.component,
                card.id
            );
            let read: Capability = serde_json::from_value(data.clone())
                .with_context(|| format!("decode worker {} advertises {data}", card.id))?;
            ensure!(
                read == expected,
                "decode worker {} advertises {data}",
                card.id
            );
            let bases = self.fleet.decode_bases();
            let own = bases
                .zip(&mut ids)
                .find(|(base, _)| card.served_at == port(base));
            let (_, id) = own.with_context(|| format!("whose card is that of {}", card.id))?;
            *id = Some(card.id);
        }
        self.ids = ids
            .into_iter()
            .map(|id| id.context("a decode worker has no card"))
            .collect::<Result<_>>()?;
        Ok(())
    }

    /// Sends `prompt`, whose answer must be the aggregated worker's, and compares what its prefill request
    /// carries with `blocks`, those that a claim must say; `None`: no claim.
    async fn expect(&mut self, what: &str, prompt: &[u32], blocks: Option<usize>) -> Result<Seen> {
        let seen = self.ask(prompt, blocks).await;
        let seen = seen.with_context(|| format!("{what}, {} tokens", prompt.len()))?;
        match blocks {
            Some(blocks) => say(format!("{what}: {blocks} blocks claimed, as held")),
            None => say(format!("{what}: no claim")),
        }
        Ok(seen)
    }

    async fn ask(&mut self, prompt: &[u32], blocks: Option<usize>) -> Result<Seen> {
        let answer = self.answer(prompt).await?;
        let lines = self.prefill.new_lines()?;
        let [line] = lines.as_slice() else {
            bail!("the prefill engine recorded {lines:?}");
        };
        ensure!(
            line.is_prefill && line.prompt_tokens == prompt.len(),
            "the prefill engine recorded {line:?}"
        );
        let homes = self.decoded_by()?;
        let [(decode, decoded)] = homes.as_slice() else {
            bail!("the decode engines recorded (worker, line) {homes:?}");
        };
        let decode = *decode;
        ensure!(
            decoded.own_hashes == line.own_hashes,
            "the engines do not hash alike: {line:?}, {decoded:?}"
        );
        self.check_claim(line, blocks, decode)?;
        tokio::time::sleep(EVENTS_ARRIVE).await;
        Ok(Seen { decode, answer })
    }

    /// The answer to `prompt`.
    async fn answer(&self, prompt: &[u32]) -> Result<Vec<u32>> {
        let base = self.fleet.base()?;
        let answer = self.client.complete(base, prompt, OUTPUT_TOKENS).await?;
        let reference = self
            .client
            .reference(self.aggregated.base(), prompt, OUTPUT_TOKENS)
            .await?;
        let verdict = compare(&reference, &answer.tokens, EPSILON);
        if let Verdict::Different { .. } = verdict {
            bail!("the answer is not the aggregated worker's: {verdict:?}");
        }
        Ok(answer.tokens)
    }

    /// The requests that decode workers had since the last call; none may carry a claim.
    fn decoded_by(&mut self) -> Result<Vec<(usize, Line)>> {
        let mut homes = Vec::new();
        for (index, records) in self.decode.iter_mut().enumerate() {
            for line in records.new_lines()? {
                ensure!(
                    !line.is_prefill && line.claim.is_none(),
                    "decode engine {index} recorded {line:?}"
                );
                homes.push((index, line));
            }
        }
        Ok(homes)
    }

    fn check_claim(&mut self, line: &Line, blocks: Option<usize>, decode: usize) -> Result<()> {
        let (claim, blocks) = match (&line.claim, blocks) {
            (None, None) => return Ok(()),
            (Some(Some(claim)), Some(blocks)) => (claim, blocks),
            (found, expected) => bail!("{expected:?} blocks must be claimed, found {found:?}"),
        };
        claim.check(line.prompt_tokens)?;
        ensure!(
            usize::try_from(claim.cached_prefix_blocks)? == blocks,
            "{blocks} blocks must be claimed, found {claim:?}"
        );
        ensure!(claim.block_size.tokens() == BLOCK_SIZE, "{claim:?}");
        ensure!(
            line.own_hashes.get(blocks - 1) == Some(&claim.prefix_hash),
            "the prefill engine's hash of block {blocks} is {:?}, found {claim:?}",
            line.own_hashes.get(blocks - 1)
        );
        ensure!(
            self.ids.get(decode) == Some(&claim.decode_worker_id.0)
                && claim.decode_dp_rank == DpRank(0),
            "decode worker {decode} of {:?} had the request, found {claim:?}",
            self.ids
        );
        self.claim_ids.push(claim.claim_id.clone());
        Ok(())
    }

    /// Sends cold prompts of different lengths together; the number of the decode worker of each.
    async fn at_once(&mut self, prompts: &[Vec<u32>]) -> Result<Vec<usize>> {
        try_join_all(prompts.iter().map(|prompt| self.answer(prompt))).await?;
        for line in self.prefill.new_lines()? {
            ensure!(line.claim.is_none(), "a cold prompt carried {line:?}");
        }
        let homes = self.decoded_by()?;
        tokio::time::sleep(EVENTS_ARRIVE).await;
        let home = |prompt: &Vec<u32>| {
            let mut homes = homes.iter();
            let home = homes.find(|(_, line)| line.prompt_tokens == prompt.len());
            Ok(home.context("no decode worker had a prompt")?.0)
        };
        prompts.iter().map(home).collect()
    }

    fn ids_are_unique(&self) -> Result<()> {
        let unique: HashSet<&String> = self.claim_ids.iter().collect();
        ensure!(
            unique.len() == self.claim_ids.len(),
            "{} claims have {} ids",
            self.claim_ids.len(),
            unique.len()
        );
        Ok(())
    }
}

/// What a worker registered.
#[derive(Debug)]
struct Card {
    component: String,
    id: u64,
    /// Port of the worker's own HTTP server.
    served_at: Option<u16>,
    runtime_data: serde_json::Map<String, serde_json::Value>,
}

/// The model cards in a file discovery.
fn cards(discovery: &Path) -> Result<Vec<Card>> {
    #[derive(Deserialize)]
    struct File {
        component: String,
        instance_id: u64,
        card_json: serde_json::Value,
    }
    let folder = discovery.join("v1/mdc");
    let entries =
        fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    entries
        .map(|entry| {
            let path = entry?.path();
            let file: File = serde_json::from_slice(&fs::read(&path)?)
                .with_context(|| format!("cannot understand {}", path.display()))?;
            let config = &file.card_json["model_info"]["hf_config_json"]["path"];
            let data = &file.card_json["runtime_config"]["runtime_data"];
            Ok(Card {
                component: file.component,
                id: file.instance_id,
                served_at: config.as_str().and_then(port),
                runtime_data: data.as_object().cloned().unwrap_or_default(),
            })
        })
        .collect()
}

/// The port in `http://host:port/...`.
fn port(url: &str) -> Option<u16> {
    let authority = url.split('/').nth(2)?;
    authority.rsplit(':').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_a_claim_is_not_one_with_null() {
        let line = |claim: &str| {
            let text = format!(
                r#"{{"request_id": "r", "is_prefill": true, "prompt_tokens": 9{claim}, "own_hashes": [18446744073709551615]}}"#
            );
            serde_json::from_str::<Line>(&text)
        };
        assert!(line("").unwrap().claim.is_none());
        assert!(matches!(
            line(r#", "claim": null"#).unwrap().claim,
            Some(None)
        ));
        assert!(line(r#", "claim": [1]"#).is_err());
    }

    #[test]
    fn ports_of_urls() {
        assert_eq!(port("http://127.0.0.1:20123"), Some(20123));
        assert_eq!(port("http://192.0.2.2:18081/v1/metadata/x"), Some(18081));
        assert_eq!(port("/models/x"), None);
    }
}
