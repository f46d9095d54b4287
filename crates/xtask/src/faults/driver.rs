// SPDX-License-Identifier: Apache-2.0

//! Plays the router over real engines, and does to requests what no router would.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::join_all;
use kvdelta_protocol::DecodeCacheInfo;
use serde_json::{Value, json};

use crate::client::Client;
use crate::faults::check::{Ending, Outcome, Report, Seen, by_label};
use crate::faults::claims::{Claims, Hashed};
use crate::faults::engine::{Engine, Kind, Life};
use crate::faults::legs::{Ask, Decoded, LegError, Legs, Prefilled};
use crate::faults::plan::{Connector, Engines, Fault, Job, Kill, Plan, Step, Victim};
use crate::fleet::BLOCK_SIZE;
use crate::outputs::{Reference, compare};
use crate::progress::{Step as Progress, say};

/// Seconds of a short lease, and by how much a late decode leg misses it.
pub(crate) const SHORT_LEASE: u64 = 6;
const BEYOND: Duration = Duration::from_secs(3);
/// Log-probability margin below which two tokens count as tied.
const EPSILON: f64 = 0.001;
/// Jobs at once.
const LANES: usize = 8;
/// A request is begun anew at most so often.
const MOST_BEGINNINGS: usize = 8;
/// Leases of 30 s have to end.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(150);
const POLL: Duration = Duration::from_millis(50);
/// Prompts that push others out: blocks of one, and how many at most.
const FILLER_BLOCKS: usize = 8;
const MOST_FILLERS: usize = 40;
/// An eviction is told with the next step's events.
const EVICTION_SEEN: Duration = Duration::from_millis(400);

/// Counters that are in the report, with their label.
const COUNTED: [(&str, &str); 4] = [
    ("vllm:kvdelta_claims_total", "outcome"),
    ("vllm:kvdelta_offers_total", "outcome"),
    ("vllm:kvdelta_recoveries_total", "kind"),
    ("vllm:kvdelta_lease_checks_total", "outcome"),
];

/// What was seen of the claims that an engine must have counted, by engine and life.
#[derive(Debug, Default)]
struct Sightings {
    /// Decode workers: stale claims of any reason.
    stale: HashMap<(usize, u32), Seen>,
    /// Prefill: offers that were cut.
    cut: HashMap<u32, Seen>,
}

/// One prefill and two decode workers, and what is known of them.
#[derive(Debug)]
pub(crate) struct Driver {
    seed: u64,
    prefill: Engine,
    decode: [Engine; 2],
    claims: Claims,
    legs: Legs,
    client: Client,
    references: Vec<Reference>,
    sightings: Mutex<Sightings>,
    /// Metrics of engines shortly before they were killed: name, life, text.
    last_words: Mutex<Vec<(Option<usize>, u32, String)>>,
}

/// How far a run is.
struct Board<'a> {
    queue: Mutex<VecDeque<&'a Job>>,
    /// Jobs of segments up to this one may begin.
    open: AtomicUsize,
    done: AtomicUsize,
    outcomes: Mutex<Vec<Outcome>>,
    failures: Mutex<Vec<String>>,
}

impl Board<'_> {
    fn is_begun(&self, segment: usize) -> bool {
        let queue = lock(&self.queue);
        queue.front().is_none_or(|job| job.segment > segment)
    }
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an attempt brought before it is compared.
struct Answer {
    tokens: Option<Vec<u32>>,
    ending: Ending,
    reason: Option<String>,
}

/// What is told of a request that failed.
#[derive(Debug, Default)]
struct Story {
    claim: Option<Value>,
    cut: bool,
    forced: bool,
    offer: Option<Value>,
}

impl Driver {
    /// `references` are the aggregated worker's answers by number of the request.
    pub(crate) fn new(
        seed: u64,
        prefill: Engine,
        decode: [Engine; 2],
        references: Vec<Reference>,
        client: &Client,
    ) -> Result<Self> {
        let claims = Claims::follow(std::iter::once(&prefill).chain(&decode))?;
        Ok(Self {
            seed,
            prefill,
            decode,
            claims,
            legs: Legs::new()?,
            client: client.clone(),
            references,
            sightings: Mutex::default(),
            last_words: Mutex::default(),
        })
    }

    fn all(&self) -> impl Iterator<Item = &Engine> {
        std::iter::once(&self.prefill).chain(&self.decode)
    }

    fn engines(&self) -> Engines {
        let kind = self.prefill.life().kind;
        Engines {
            prefill: kind.connector,
            decode: [0, 1].map(|index: usize| self.decode[index].life().kind.connector),
            short_lease: kind.lease.is_some(),
        }
    }

    /// Runs the whole plan.
    ///
    /// # Errors
    /// An engine that died of itself, or could not be started again. Requests that fail are in the report.
    pub(crate) async fn run(&self, plan: &Plan) -> Result<Report> {
        let began = Instant::now();
        let board = Board {
            queue: Mutex::new(plan.jobs.iter().collect()),
            open: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            outcomes: Mutex::default(),
            failures: Mutex::default(),
        };
        let lanes = join_all((0..LANES).map(|_| self.lane(&board)));
        let work = async {
            let ((), kills) = tokio::join!(
                async {
                    lanes.await;
                },
                self.kills(&board, &plan.kills)
            );
            kills
        };
        let requests = plan.steps().count();
        tokio::select! {
            done = work => done?,
            error = self.watch(&board, requests) => return Err(error),
        }
        let mut broken = self.settle().await?;
        let counters = self.count(&mut broken).await?;
        let mut outcomes = std::mem::take(&mut *lock(&board.outcomes));
        outcomes.sort_by_key(|outcome| outcome.index);
        let failures = std::mem::take(&mut *lock(&board.failures));
        Ok(Report {
            seed: self.seed,
            requests,
            kills: plan.kills.clone(),
            seconds: began.elapsed().as_secs_f64(),
            outcomes,
            failures,
            broken,
            counters,
        })
    }

    /// Ends when an engine has died of itself.
    async fn watch(&self, board: &Board<'_>, requests: usize) -> anyhow::Error {
        let mut progress = Progress::begin(format!("{requests} requests with faults"));
        loop {
            for engine in self.all() {
                let life = engine.life();
                if let Err(error) = engine.check()
                    && life.up
                    && engine.life() == life
                {
                    return error
                        .context(format!("{} died, and nobody had killed it", engine.name));
                }
            }
            let (done, failed) = (
                board.done.load(Ordering::Relaxed),
                lock(&board.failures).len(),
            );
            progress.tick(&format!("({done} done, {failed} failed)"));
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn kills(&self, board: &Board<'_>, kills: &[Kill]) -> Result<()> {
        for (segment, kill) in kills.iter().enumerate() {
            while !board.is_begun(segment) {
                tokio::time::sleep(POLL).await;
            }
            tokio::time::sleep(Duration::from_millis(kill.after_ms)).await;
            let (engine, index) = match kill.victim {
                Victim::Prefill => (&self.prefill, None),
                Victim::Decode(index) => (&self.decode[index], Some(index)),
            };
            let url = format!("{}/metrics", engine.base());
            let words = self.client.get(&url).await.unwrap_or_default();
            lock(&self.last_words).push((index, engine.life().number, words));
            engine.kill();
            board.open.fetch_add(1, Ordering::Relaxed);
            engine
                .revive(Kind {
                    connector: kill.connector,
                    lease: kill.short_lease.then_some(SHORT_LEASE),
                })
                .await?;
        }
        Ok(())
    }

    async fn lane(&self, board: &Board<'_>) {
        while let Some((job, home)) = self.next(board).await {
            for step in &job.steps {
                match self.step(step, home).await {
                    Ok(outcome) => lock(&board.outcomes).push(outcome),
                    Err(story) => {
                        say(format!("FAILED {story}"));
                        lock(&board.failures).push(story);
                    }
                }
                board.done.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The next job that can run with the engines that are there, and its decode worker.
    async fn next<'a>(&self, board: &Board<'a>) -> Option<(&'a Job, usize)> {
        loop {
            {
                let open = board.open.load(Ordering::Relaxed);
                let mut queue = lock(&board.queue);
                queue.front()?;
                let all_up = self.all().all(|engine| engine.life().up);
                let allowed = queue.iter().take_while(|job| job.segment <= open);
                let found = allowed.enumerate().find_map(|(at, job)| {
                    let home = self.home(job.fault(), job.home);
                    // With all engines up none becomes what a job waits for.
                    home.or_else(|| all_up.then_some(job.home))
                        .map(|home| (at, home))
                });
                if let Some((at, home)) = found {
                    return queue.remove(at).map(|job| (job, home));
                }
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// A decode worker, better `wanted`, with which the fault can come about now.
    fn home(&self, fault: Fault, wanted: usize) -> Option<usize> {
        let engines = self.engines();
        [wanted, 1 - wanted].into_iter().find(|home| {
            self.involved(fault, *home).all(|engine| engine.life().up) && fault.fits(engines, *home)
        })
    }

    /// The engines without which a request cannot go on.
    fn involved(&self, fault: Fault, home: usize) -> impl Iterator<Item = &Engine> {
        let uses_other = matches!(fault, Fault::OtherDecode | Fault::StockDecode | Fault::Void);
        let other = uses_other.then(|| &self.decode[1 - home]);
        [&self.prefill, &self.decode[home]].into_iter().chain(other)
    }

    /// Sends one request until it ends, anew when an engine was killed under it.
    async fn step(&self, step: &Step, home: usize) -> Result<Outcome, String> {
        let mut home = home;
        let mut fault = step.fault;
        let mut begun_again = 0;
        loop {
            if !fault.fits(self.engines(), home) {
                fault = Fault::None;
            }
            let lives: Vec<Life> = self.involved(fault, home).map(Engine::life).collect();
            let mut story = Story::default();
            let attempt = Attempt {
                driver: self,
                step,
                fault,
                home,
                id: format!(
                    "f{}-{}-{begun_again}{}",
                    self.seed,
                    step.index,
                    if fault == Fault::LostNotice {
                        "-lost-notice"
                    } else {
                        ""
                    }
                ),
            };
            let error = match attempt.run(&mut story).await {
                Ok(answer) => {
                    return Ok(Outcome {
                        index: step.index,
                        fault,
                        ending: answer.ending,
                        claimed_blocks: blocks_of(story.claim.as_ref()),
                        cut: story.cut,
                        forced: story.forced,
                        reason: answer.reason,
                        begun_again,
                        verdict: answer
                            .tokens
                            .map(|tokens| self.verdict(step.index, &tokens, fault.leaves())),
                    });
                }
                Err(error) => error,
            };
            let killed = self
                .involved(fault, home)
                .map(Engine::life)
                .ne(lives.iter().copied());
            if !killed || begun_again == MOST_BEGINNINGS {
                return Err(self.failure(step, fault, home, &story, &error));
            }
            begun_again += 1;
            if self.prefill.up().await.is_err() {
                return Err(self.failure(step, fault, home, &story, &error));
            }
            // The dead decode worker's requests go to the other one.
            if !self.decode[home].life().up {
                home = 1 - home;
            }
            if self.decode[home].up().await.is_err() {
                return Err(self.failure(step, fault, home, &story, &error));
            }
        }
    }

    fn verdict(&self, index: usize, tokens: &[u32], is_part: bool) -> crate::outputs::Verdict {
        let whole = &self.references[index];
        if is_part {
            let part = Reference {
                tokens: whole.tokens.iter().copied().take(tokens.len()).collect(),
                rivals: whole.rivals.iter().copied().take(tokens.len()).collect(),
            };
            return compare(&part, tokens, EPSILON);
        }
        compare(whole, tokens, EPSILON)
    }

    /// All that is needed to repeat a request that failed.
    fn failure(
        &self,
        step: &Step,
        fault: Fault,
        home: usize,
        story: &Story,
        error: &LegError,
    ) -> String {
        let text =
            |value: &Option<Value>| value.as_ref().map_or("none".to_owned(), Value::to_string);
        format!(
            "request {} of seed {}, {fault}: {error}; prompt of {} tokens, salt {:?}, claim {}, offer {}, engines \
             {:?}, decode worker {home}\nend of {}:\n{}\nend of {}:\n{}",
            step.index,
            self.seed,
            step.prompt.len(),
            step.salt,
            text(&story.claim),
            text(&story.offer),
            self.engines(),
            self.prefill.log().display(),
            self.prefill.log_tail(),
            self.decode[home].log().display(),
            self.decode[home].log_tail(),
        )
    }

    fn saw_decode(&self, index: usize, life: u32, change: impl FnOnce(&mut Seen)) {
        change(
            lock(&self.sightings)
                .stale
                .entry((index, life))
                .or_default(),
        );
    }

    fn saw_prefill(&self, life: u32, change: impl FnOnce(&mut Seen)) {
        change(lock(&self.sightings).cut.entry(life).or_default());
    }

    /// Waits until all blocks are free and no request is left; what is not as at the start.
    async fn settle(&self) -> Result<Vec<String>> {
        let mut progress = Progress::begin("until all blocks are free");
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let mut left = Vec::new();
            for engine in self.all() {
                engine.check()?;
                engine.nudge().await?;
                for name in [
                    "vllm:kv_cache_usage_perc",
                    "vllm:num_requests_running",
                    "vllm:num_requests_waiting",
                ] {
                    let value = self.client.metric(engine.base(), name).await?;
                    let value = value.with_context(|| format!("{} has no {name}", engine.name))?;
                    if value != 0.0 {
                        left.push(format!("{}: {name} {value}", engine.name));
                    }
                }
            }
            if left.is_empty() || Instant::now() > deadline {
                progress.end();
                return Ok(left);
            }
            progress.tick(&format!("({})", left.join(", ")));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// The engines' counters, summed; what is not as it was seen goes to `broken`.
    async fn count(&self, broken: &mut Vec<String>) -> Result<BTreeMap<String, u64>> {
        let mut texts: Vec<(Option<usize>, u32, String, bool)> = lock(&self.last_words)
            .iter()
            .map(|(index, life, text)| (*index, *life, text.clone(), true))
            .collect();
        for (number, engine) in self.all().enumerate() {
            let url = format!("{}/metrics", engine.base());
            let text = self.client.get(&url).await?;
            texts.push((number.checked_sub(1), engine.life().number, text, false));
        }
        let mut sums = BTreeMap::new();
        let sightings = lock(&self.sightings);
        for (index, life, text, is_dead) in &texts {
            let count = |name: &str, label: &str, values: &[&str]| -> u64 {
                let all = by_label(text, name, label);
                values.iter().filter_map(|value| all.get(*value)).sum()
            };
            for (name, label) in COUNTED {
                for (value, count) in by_label(text, name, label) {
                    *sums
                        .entry(format!("{name}{{{label}={value}}}"))
                        .or_default() += count;
                }
            }
            let found = match index {
                Some(index) => {
                    // Each is counted once there, whatever was stale.
                    let kinds = ["recompute", "ask_again", "failed"];
                    let stale = count("vllm:kvdelta_recoveries_total", "kind", &kinds);
                    let seen = sightings.stale.get(&(*index, *life)).copied();
                    let what = format!("decode worker {index}, life {life}, stale claims");
                    seen.unwrap_or_default().broken(&what, stale, *is_dead)
                }
                None => {
                    let cut = count("vllm:kvdelta_claims_total", "outcome", &["skipped"]);
                    let seen = sightings.cut.get(life).copied();
                    let what = format!("prefill, life {life}, claims by which blocks were skipped");
                    seen.unwrap_or_default().broken(&what, cut, *is_dead)
                }
            };
            broken.extend(found);
        }
        Ok(sums)
    }
}

fn blocks_of(claim: Option<&Value>) -> Option<u64> {
    claim?.get("cached_prefix_blocks")?.as_u64()
}

/// One way through both legs.
struct Attempt<'a> {
    driver: &'a Driver,
    step: &'a Step,
    fault: Fault,
    home: usize,
    id: String,
}

impl Attempt<'_> {
    fn hashed(&self) -> Hashed<'_> {
        Hashed {
            tokens: &self.step.prompt,
            salt: self.step.salt.as_deref(),
        }
    }

    fn ask(&self) -> Ask<'_> {
        Ask {
            id: &self.id,
            prompt: &self.step.prompt,
            salt: self.step.salt.as_deref(),
            output_tokens: self.step.output_tokens,
        }
    }

    fn decode(&self) -> &Engine {
        &self.driver.decode[self.home]
    }

    async fn run(&self, story: &mut Story) -> Result<Answer, LegError> {
        story.claim = self.claim().await?;
        let Some(first) = self.prefill_or_leave(story).await? else {
            return Ok(left(None));
        };
        story.cut = first.cut_for().is_some();
        story.offer = Some(first.params.clone());
        if self.fault == Fault::LeavesBetween {
            return Ok(left(None));
        }
        self.meanwhile(story).await?;
        match self.fault {
            Fault::Void => return self.again(&first, Ending::AskedAgain).await,
            Fault::LeavesDecode | Fault::LeavesStream => return self.leave(first).await,
            _ => {}
        }
        let target = match self.fault {
            Fault::OtherDecode | Fault::StockDecode => 1 - self.home,
            _ => self.home,
        };
        if matches!(self.fault, Fault::OtherDecode) {
            story.forced = story.cut;
        }
        let mut params = first.params.clone();
        if self.fault == Fault::BadOffer {
            spoil(&mut params, self.step.draw);
            story.offer = Some(params.clone());
        }
        let mut answer = self.decode_leg(target, &first, params.clone()).await?;
        if self.fault == Fault::Twice {
            // Whatever the first one brought, this offer is over.
            story.forced = true;
            let other = 1 - self.home;
            let is_own = self.driver.decode[other].life().kind.connector == Connector::Own;
            let second = if is_own && !self.step.draw.is_multiple_of(2) {
                other
            } else {
                target
            };
            answer = self.decode_leg(second, &first, params).await?;
        }
        Ok(answer)
    }

    /// The claim that goes to prefill.
    async fn claim(&self) -> Result<Option<Value>, LegError> {
        let (driver, decode) = (self.driver, self.decode());
        if decode.life().kind.connector == Connector::Stock {
            return Ok(None);
        }
        let prompt = self.hashed();
        if self.step.warm_blocks > 0 && self.fault != Fault::OtherSalt {
            driver
                .claims
                .holds(decode.of, prompt, self.step.warm_blocks)
                .await;
        }
        let natural = || driver.claims.claim(decode.of, prompt, &self.id);
        let claim = match self.fault {
            Fault::TooLong | Fault::NeverHeld => {
                let most = prompt.tokens.len().saturating_sub(1) / BLOCK_SIZE;
                let blocks = match self.fault {
                    Fault::TooLong => driver.claims.held(decode.of, prompt) + 1,
                    _ => most,
                };
                self.known_to_prefill(blocks.min(most)).await?
            }
            Fault::OtherHash => natural().map(|mut claim| {
                claim.prefix_hash.0 ^= 1 << (self.step.draw % 64);
                claim
            }),
            Fault::OtherSalt => {
                let salt = self
                    .step
                    .salt
                    .as_deref()
                    .map(|salt| salt.replacen('b', "a", 1));
                let other = Hashed {
                    salt: salt.as_deref(),
                    ..prompt
                };
                driver
                    .claims
                    .holds(decode.of, other, self.step.warm_blocks)
                    .await;
                driver.claims.claim(decode.of, other, &self.id)
            }
            _ => natural(),
        };
        let claim = claim.map(|claim| json!(claim));
        Ok(match self.fault {
            Fault::BadClaim => claim.map(|claim| senseless(claim, self.step.draw)),
            _ => claim,
        })
    }

    /// A claim about decode of `blocks` blocks with prefill's own hash: prefill computes the prompt first.
    async fn known_to_prefill(&self, blocks: usize) -> Result<Option<DecodeCacheInfo>, LegError> {
        let driver = self.driver;
        let one = Ask {
            output_tokens: 1,
            ..self.ask()
        };
        driver.legs.alone(driver.prefill.base(), one, None).await?;
        let (of, known) = (self.decode().of, driver.prefill.of);
        driver.claims.holds(known, self.hashed(), blocks).await;
        Ok(driver
            .claims
            .forced(of, known, self.hashed(), blocks, &self.id))
    }

    /// The first prefill leg; `None`: the client left.
    async fn prefill_or_leave(&self, story: &Story) -> Result<Option<Prefilled>, LegError> {
        let driver = self.driver;
        let life = driver.prefill.life().number;
        let base = driver.prefill.base();
        let asked = driver
            .legs
            .prefill(base, self.ask(), story.claim.as_ref(), None);
        if self.fault == Fault::LeavesPrefill {
            let patience = Duration::from_millis(self.step.draw % 60);
            let answer = tokio::time::timeout(patience, asked).await;
            driver.saw_prefill(life, |seen| seen.unknown += 1);
            return answer.map_or(Ok(None), |answer| answer.map(|_| None));
        }
        let answer = asked.await;
        driver.saw_prefill(life, |seen| match &answer {
            Ok(answer) if answer.cut_for().is_some() => seen.sure += 1,
            Ok(_) => {}
            Err(_) => seen.unknown += 1,
        });
        answer.map(Some)
    }

    /// What happens between the legs.
    async fn meanwhile(&self, story: &mut Story) -> Result<(), LegError> {
        let driver = self.driver;
        let claimed = usize::try_from(blocks_of(story.claim.as_ref()).unwrap_or(0)).unwrap_or(0);
        let by_hand = self.step.draw.is_multiple_of(2);
        match self.fault {
            Fault::EvictWhole | Fault::EvictTail | Fault::EvictMiddle if claimed > 0 => {
                let (goal, hand) = match self.fault {
                    Fault::EvictWhole => (0, 0..1),
                    Fault::EvictTail => (claimed - 1, claimed.saturating_sub(2)..claimed),
                    _ => (claimed - 1, claimed / 2..claimed / 2 + 1),
                };
                if by_hand || self.fault == Fault::EvictMiddle {
                    self.evict(hand).await?;
                } else {
                    self.fill(goal).await?;
                }
                self.evicted(goal).await;
                let held = driver.claims.held(self.decode().of, self.hashed());
                story.forced = story.cut && held < claimed;
            }
            Fault::TooLong | Fault::NeverHeld => {
                let held = driver.claims.held(self.decode().of, self.hashed());
                story.forced = story.cut && held < claimed;
            }
            Fault::OtherHash | Fault::OtherSalt | Fault::BadClaim => {
                story.forced = story.claim.is_some();
            }
            Fault::StockDecode | Fault::Void => story.forced = story.cut,
            Fault::Late => {
                tokio::time::sleep(Duration::from_millis(200 + self.step.draw % 2000)).await;
                story.forced = true;
            }
            Fault::BeyondLease => {
                tokio::time::sleep(Duration::from_secs(SHORT_LEASE) + BEYOND).await;
                // Prefill ends leases when it takes a step.
                let one = Ask {
                    prompt: &[4],
                    salt: None,
                    output_tokens: 1,
                    ..self.ask()
                };
                for _ in 0..2 {
                    driver.legs.alone(driver.prefill.base(), one, None).await?;
                }
                story.forced = true;
            }
            Fault::FullHit => {
                let held = driver.claims.held(self.decode().of, self.hashed());
                story.forced = held == (self.step.prompt.len() - 1) / BLOCK_SIZE;
            }
            Fault::None => {}
            _ => story.forced = true,
        }
        Ok(())
    }

    /// Takes blocks out of decode's cache by their hashes.
    async fn evict(&self, blocks: std::ops::Range<usize>) -> Result<(), LegError> {
        let (driver, of) = (self.driver, self.decode().of);
        let hashes = driver.claims.engine_hashes(of, self.hashed(), blocks);
        let one = Ask {
            prompt: &[4],
            salt: None,
            output_tokens: 1,
            ..self.ask()
        };
        let params = json!({ "fault_evict": hashes });
        let base = self.decode().base();
        driver.legs.alone(base, one, Some(params)).await?;
        driver.legs.alone(base, one, None).await
    }

    /// Sends decode other prompts until it holds no more than `goal` blocks of this one.
    async fn fill(&self, goal: usize) -> Result<(), LegError> {
        let mut random = fastrand::Rng::with_seed(self.step.draw);
        for _ in 0..MOST_FILLERS {
            if self.driver.claims.held(self.decode().of, self.hashed()) <= goal {
                break;
            }
            let filler: Vec<u32> = (0..=FILLER_BLOCKS * BLOCK_SIZE)
                .map(|_| random.u32(4..4096))
                .collect();
            let one = Ask {
                prompt: &filler,
                salt: None,
                output_tokens: 1,
                ..self.ask()
            };
            self.driver
                .legs
                .alone(self.decode().base(), one, None)
                .await?;
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Waits a little for the events of an eviction.
    async fn evicted(&self, goal: usize) {
        let deadline = Instant::now() + EVICTION_SEEN;
        while self.driver.claims.held(self.decode().of, self.hashed()) > goal
            && Instant::now() < deadline
        {
            tokio::time::sleep(POLL).await;
        }
    }

    /// The decode leg to worker `target`, and what a router does if that fails.
    async fn decode_leg(
        &self,
        target: usize,
        first: &Prefilled,
        params: Value,
    ) -> Result<Answer, LegError> {
        match self.decode_once(target, first, params).await {
            Ok(decoded) => Ok(self.answer(decoded, first, Ending::Answered)),
            Err(error) if error.is_engines() => self.again(first, Ending::AskedAgain).await,
            Err(error) => Err(error),
        }
    }

    /// Asks the same prefill worker again without a claim; the old offer is free.
    async fn again(&self, first: &Prefilled, ending: Ending) -> Result<Answer, LegError> {
        let driver = self.driver;
        let base = driver.prefill.base();
        let release = first.request_id();
        let second = driver.legs.prefill(base, self.ask(), None, release).await?;
        let params = second.params.clone();
        let decoded = self.decode_once(self.home, first, params).await?;
        Ok(self.answer(decoded, first, ending))
    }

    /// What decode has to continue: with B19, prefill's token is part of its prompt.
    fn decode_prompt(&self, first: &Prefilled) -> (Vec<u32>, usize) {
        let mut prompt = self.step.prompt.clone();
        let mut output_tokens = self.step.output_tokens;
        if self.fault == Fault::OneMore {
            prompt.push(first.token);
            output_tokens -= 1;
        }
        (prompt, output_tokens)
    }

    async fn decode_once(
        &self,
        target: usize,
        first: &Prefilled,
        params: Value,
    ) -> Result<Decoded, LegError> {
        let driver = self.driver;
        let engine = &driver.decode[target];
        let (life, prefill) = (engine.life().number, driver.prefill.life());
        let (prompt, output_tokens) = self.decode_prompt(first);
        let ask = Ask {
            prompt: &prompt,
            output_tokens,
            ..self.ask()
        };
        // A stream does not tell of stale claims.
        if self.step.stream && self.fault == Fault::None && first.cut_for().is_none() {
            let streamed = driver.legs.stream(engine.base(), ask, params, usize::MAX);
            let streamed = streamed.await;
            driver.saw_decode(target, life, |seen| seen.unknown += 1);
            return streamed.map(|tokens| Decoded {
                tokens,
                stale: None,
            });
        }
        let decoded = driver.legs.decode(engine.base(), ask, params).await;
        let same_prefill = driver.prefill.life() == prefill;
        driver.saw_decode(target, life, |seen| match &decoded {
            Ok(Decoded { stale: Some(_), .. }) => seen.sure += 1,
            Ok(_) => {}
            Err(error) if error.is_engines() && same_prefill && self.fault != Fault::BadOffer => {
                seen.sure += 1;
            }
            Err(_) => seen.unknown += 1,
        });
        decoded
    }

    fn answer(&self, decoded: Decoded, first: &Prefilled, ending: Ending) -> Answer {
        let mut tokens = decoded.tokens;
        if self.fault == Fault::OneMore {
            tokens.insert(0, first.token);
        }
        let reason = decoded
            .stale
            .as_ref()
            .and_then(|stale| stale.get("reason")?.as_str().map(str::to_owned));
        let ending = match ending {
            Ending::Answered if decoded.stale.is_some() => Ending::Recomputed,
            other => other,
        };
        Answer {
            tokens: Some(tokens),
            ending,
            reason,
        }
    }

    /// Sends the decode leg and leaves before the first token, or in the middle of the answer.
    async fn leave(&self, first: Prefilled) -> Result<Answer, LegError> {
        let driver = self.driver;
        let engine = self.decode();
        let life = engine.life().number;
        let parts = match self.fault {
            Fault::LeavesStream => 2 + usize::try_from(self.step.draw % 20).unwrap_or(0),
            _ => usize::MAX,
        };
        let streamed = driver
            .legs
            .stream(engine.base(), self.ask(), first.params, parts);
        driver.saw_decode(self.home, life, |seen| seen.unknown += 1);
        if self.fault == Fault::LeavesDecode {
            let patience = Duration::from_millis(self.step.draw % 40);
            let answer = tokio::time::timeout(patience, streamed).await;
            return answer.map_or(Ok(left(None)), |answer| answer.map(|_| left(None)));
        }
        match streamed.await {
            Ok(tokens) => Ok(left(Some(tokens))),
            // It would have been asked again; the client does not wait for it.
            Err(error) if error.is_engines() => Ok(left(None)),
            Err(error) => Err(error),
        }
    }
}

fn left(tokens: Option<Vec<u32>>) -> Answer {
    Answer {
        tokens,
        ending: Ending::Left,
        reason: None,
    }
}

/// A claim that must not be believed.
fn senseless(mut claim: Value, draw: u64) -> Value {
    match draw % 9 {
        0 => claim["version"] = json!(2),
        1 => claim["cached_prefix_blocks"] = json!(0),
        2 => claim["cached_prefix_blocks"] = json!(4_000_000_000_u32),
        3 => claim["cached_prefix_blocks"] = json!(-1),
        4 => claim["block_size"] = json!(0),
        5 => claim["block_size"] = json!("32"),
        6 => claim["prefix_hash"] = json!(null),
        7 => claim = json!(["claim"]),
        _ => claim["claim_id"] = json!(""),
    }
    claim
}

/// Changes an offer into one that no prefill worker writes.
fn spoil(params: &mut Value, draw: u64) {
    let blocks = |params: &mut Value, value: Value| {
        let inner = if params.pointer("/kvdelta/params").is_some() {
            &mut params["kvdelta"]["params"]
        } else {
            params
        };
        inner["remote_block_ids"] = value;
    };
    let is_cut = params.get("kvdelta").is_some_and(Value::is_object);
    match draw % 10 {
        0 => blocks(params, json!([[1_000_000_000]])),
        1 => blocks(params, json!([[-1, -2]])),
        2 => blocks(params, json!("blocks")),
        3 => blocks(params, json!([["1"], [null]])),
        4 => blocks(params, json!([[1], [1]])),
        5 if is_cut => params["kvdelta"]["first_block"] = json!(1_000_000),
        6 if is_cut => params["kvdelta"]["version"] = json!(99),
        7 if is_cut => params["kvdelta"]["group_first_blocks"] = json!([]),
        8 if is_cut => params["kvdelta"]["params"] = json!(null),
        9 if is_cut => params["kvdelta"]["block_size"] = json!(0),
        _ => blocks(params, json!([[]])),
    }
}
