// SPDX-License-Identifier: Apache-2.0

//! One way of a request through both legs, with its fault.

use std::time::{Duration, Instant};

use kvdelta_protocol::DecodeCacheInfo;
use serde_json::{Value, json};

use crate::faults::check::Ending;
use crate::faults::claims::Hashed;
use crate::faults::driver::{Driver, POLL, SHORT_LEASE};
use crate::faults::engine::Engine;
use crate::faults::legs::{Ask, Decoded, LegError, Prefilled};
use crate::faults::plan::{Connector, Fault, Step, WORDS};
use crate::fleet::BLOCK_SIZE;

/// By how much a late decode leg misses a short lease.
const BEYOND: Duration = Duration::from_secs(3);
/// Prompts that push others out: blocks of one, and how many at most.
const FILLER_BLOCKS: usize = 8;
const MOST_FILLERS: usize = 40;
/// An eviction is told with the next step's events.
const EVICTION_SEEN: Duration = Duration::from_millis(400);

/// What an attempt brought before it is compared.
pub(crate) struct Answer {
    pub(crate) tokens: Option<Vec<u32>>,
    pub(crate) ending: Ending,
    pub(crate) reason: Option<String>,
}

/// What is told of a request that failed.
#[derive(Debug, Default)]
pub(crate) struct Story {
    pub(crate) claim: Option<Value>,
    pub(crate) cut: bool,
    pub(crate) forced: bool,
    pub(crate) offer: Option<Value>,
}

pub(crate) fn blocks_of(claim: Option<&Value>) -> Option<u64> {
    claim?.get("cached_prefix_blocks")?.as_u64()
}

/// One way through both legs.
pub(crate) struct Attempt<'a> {
    pub(crate) driver: &'a Driver,
    pub(crate) step: &'a Step,
    pub(crate) fault: Fault,
    pub(crate) home: usize,
    pub(crate) id: String,
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

    /// Goes it; `story` is told as far as it comes.
    pub(crate) async fn run(&self, story: &mut Story) -> Result<Answer, LegError> {
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
        // A lease that ended shows where blocks are read: what waits so long loses most prefixes.
        let is_whole = self.fault == Fault::BeyondLease && !self.step.draw.is_multiple_of(4);
        if decode.life().kind.connector == Connector::Stock || is_whole {
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
        let base = self.decode().base();
        driver.legs.evict(base, &self.id, &hashes).await
    }

    /// Sends decode other prompts until it holds no more than `goal` blocks of this one.
    async fn fill(&self, goal: usize) -> Result<(), LegError> {
        let mut random = fastrand::Rng::with_seed(self.step.draw);
        for _ in 0..MOST_FILLERS {
            if self.driver.claims.held(self.decode().of, self.hashed()) <= goal {
                break;
            }
            let filler: Vec<u32> = (0..=FILLER_BLOCKS * BLOCK_SIZE)
                .map(|_| random.u32(WORDS))
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
    match draw % 11 {
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
        10 if is_cut => {
            let hash = params["kvdelta"]["prefix_hash"].as_u64().unwrap_or(0);
            params["kvdelta"]["prefix_hash"] = json!(hash ^ 1);
        }
        _ => blocks(params, json!([[]])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Value {
        json!({
            "version": 1,
            "claim_id": "c",
            "decode_worker_id": 1,
            "decode_dp_rank": 0,
            "cached_prefix_blocks": 3,
            "block_size": 32,
            "prefix_hash": 7,
        })
    }

    #[test]
    fn a_senseless_claim_is_never_a_claim() {
        let good: DecodeCacheInfo = serde_json::from_value(claim()).unwrap();
        good.check(97).unwrap();
        for draw in 0..18 {
            let bad = senseless(claim(), draw);
            let read = serde_json::from_value::<DecodeCacheInfo>(bad.clone());
            assert!(!read.is_ok_and(|read| read.check(97).is_ok()), "{bad}");
        }
    }

    #[test]
    fn a_spoiled_offer_is_another_one() {
        let whole = json!({"do_remote_prefill": true, "remote_block_ids": [[1, 2]]});
        let cut = json!({"do_remote_prefill": false, "kvdelta": {
            "version": 1, "first_block": 2, "group_first_blocks": [2], "block_size": 32,
            "prefix_hash": u64::MAX, "params": {"remote_block_ids": [[3]]},
        }});
        for good in [whole, cut] {
            for draw in 0..22 {
                let mut bad = good.clone();
                spoil(&mut bad, draw);
                assert_ne!(bad, good, "draw {draw}");
            }
        }
    }
}
