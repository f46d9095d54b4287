// SPDX-License-Identifier: Apache-2.0

//! Plays the router over real engines, and does to requests what no router would.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::future::join_all;
use serde_json::Value;

use crate::client::Client;
use crate::faults::attempt::{Attempt, Story, blocks_of};
use crate::faults::check::{Outcome, Report, Seen, by_label};
use crate::faults::claims::Claims;
use crate::faults::engine::{Engine, Kind, Life, settle};
use crate::faults::legs::{LegError, Legs};
use crate::faults::plan::{Engines, Fault, Job, Kill, Plan, Step, Victim};
use crate::outputs::{Reference, compare};
use crate::progress::{Step as Progress, say};

/// Seconds of a short lease.
pub(crate) const SHORT_LEASE: u64 = 6;
/// Log-probability margin below which two tokens count as tied.
pub(crate) const EPSILON: f64 = 0.001;
/// Jobs at once.
const LANES: usize = 8;
/// A request is begun anew at most so often.
const MOST_BEGINNINGS: usize = 8;
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// Counters that are in the report, with their label.
const COUNTED: [(&str, &str); 8] = [
    ("vllm:kvdelta_claims_total", "outcome"),
    ("vllm:kvdelta_offers_total", "outcome"),
    ("vllm:kvdelta_recoveries_total", "kind"),
    ("vllm:kvdelta_lease_checks_total", "outcome"),
    ("vllm:kvdelta_full_hits_total", "engine"),
    ("vllm:kvdelta_leases_expired_total", "engine"),
    ("vllm:kvdelta_released_offers_total", "engine"),
    ("vllm:kvdelta_stale_blocks_total", "engine"),
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
    pub(crate) prefill: Engine,
    pub(crate) decode: [Engine; 2],
    pub(crate) claims: Claims,
    pub(crate) legs: Legs,
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
        let mut broken = settle(&self.all().collect::<Vec<_>>()).await?;
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
        let uses_other = matches!(
            fault,
            Fault::OtherDecode | Fault::StockDecode | Fault::Twice
        );
        let other = uses_other.then(|| &self.decode[1 - home]);
        [&self.prefill, &self.decode[home]].into_iter().chain(other)
    }

    /// Sends one request until it ends, anew when an engine was killed under it.
    async fn step(&self, step: &Step, home: usize) -> Result<Outcome, String> {
        let mut home = home;
        let mut fault = step.fault;
        let mut begun_again = 0;
        loop {
            home = self.all_up(fault, home).await;
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
        }
    }

    /// Waits until the engines of a request are there. A dead decode worker's requests go to the other one.
    async fn all_up(&self, fault: Fault, home: usize) -> usize {
        let home = match (self.decode[home].life().up, self.decode[1 - home].life().up) {
            (false, true) => 1 - home,
            _ => home,
        };
        for engine in self.involved(fault, home) {
            engine.up().await;
        }
        home
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

    /// Something that decode worker `index` counts in that life.
    pub(crate) fn saw_decode(&self, index: usize, life: u32, change: impl FnOnce(&mut Seen)) {
        change(
            lock(&self.sightings)
                .stale
                .entry((index, life))
                .or_default(),
        );
    }

    /// Something that prefill counts in that life.
    pub(crate) fn saw_prefill(&self, life: u32, change: impl FnOnce(&mut Seen)) {
        change(lock(&self.sightings).cut.entry(life).or_default());
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
