// SPDX-License-Identifier: Apache-2.0

//! What stands in a worker for the engine: it keeps the requests and does as scripted.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dynamo_llm::protocols::common::FinishReason;
use dynamo_llm::protocols::common::llm_backend::LLMEngineOutput;
use dynamo_llm::types::Annotated;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::engine::{AsyncEngineContext, AsyncEngineContextProvider};
use dynamo_runtime::error::{DynamoError, ErrorClass};
use dynamo_runtime::pipeline::{AsyncEngine, Error, ManyOut, ResponseStream, SingleIn};
use dynamo_runtime::protocols::maybe_error::MaybeError;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::loose::Loose;
use super::script::{Script, Step};

/// A prompt that a worker answers whatever its script, and does not keep.
pub(super) const PROBE: [u32; 3] = [97, 98, 99];

/// How a request ended at a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It has not.
    Running,
    /// By the last output.
    Finished,
    /// The worker refused it.
    Refused,
    /// The router or the client gave it up.
    Aborted,
    /// The worker died.
    Died,
}

/// A request as a worker got it.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// Its place among all that the fleet's workers got.
    pub(crate) order: u64,
    /// Dynamo's id of the request, the same for both legs.
    pub(crate) id: String,
    /// The whole request, undecoded.
    pub(crate) request: Value,
    /// How it ended.
    pub(crate) outcome: Outcome,
}

impl Received {
    /// The rank that it was sent to, if the router chose one.
    pub(crate) fn rank(&self) -> Option<u64> {
        self.request.pointer("/routing/dp_rank")?.as_u64()
    }

    /// The claim that came with it.
    pub(crate) fn claim(&self) -> Option<&Value> {
        self.request
            .get("decode_cache_info")
            .filter(|claim| !claim.is_null())
    }

    /// A field of the claim that came with it.
    pub(crate) fn claimed(&self, field: &str) -> Option<u64> {
        self.claim()?.get(field)?.as_u64()
    }

    /// The id of the claim that came with it.
    pub(crate) fn claim_id(&self) -> Option<&str> {
        self.claim()?.get("claim_id")?.as_str()
    }

    /// What the prefill worker handed over.
    pub(crate) fn offer(&self) -> Option<&Value> {
        self.request.pointer("/prefill_result/disaggregated_params")
    }

    /// The claim that what the prefill worker handed over was cut for.
    pub(crate) fn cut_for(&self) -> Option<&str> {
        self.cut_offer("claim_id")
    }

    /// By which id the prefill worker knows what it cut.
    pub(crate) fn cut_offer_id(&self) -> Option<&str> {
        self.cut_offer("params/remote_request_id")
    }

    fn cut_offer(&self, field: &str) -> Option<&str> {
        let pointer = format!("/kv_transfer_params/kvdelta/{field}");
        self.offer()?.pointer(&pointer)?.as_str()
    }

    /// The offer of another request that it takes back.
    pub(crate) fn release(&self) -> Option<&str> {
        self.request.get("release_offer")?.as_str()
    }
}

/// A worker's state.
pub(super) struct State {
    pub(super) name: String,
    pub(super) role: WorkerType,
    pub(super) order: Arc<AtomicU64>,
    pub(super) next: Mutex<VecDeque<Script>>,
    pub(super) always: Mutex<Script>,
    pub(super) received: watch::Sender<Vec<Received>>,
    pub(super) dead: watch::Sender<bool>,
    pub(super) cuts: bool,
}

impl State {
    fn script(&self) -> Script {
        let next = lock(&self.next).pop_front();
        next.unwrap_or_else(|| lock(&self.always).clone())
    }

    /// `claim_id` is of the claim that prefill cuts its offer for, or has cut it for.
    fn output(&self, step: &Step, claim_id: Option<&str>) -> LLMEngineOutput {
        let offer = || match claim_id {
            Some(id) => json!({
                "from": self.name,
                "kv_transfer_params": {"kvdelta": {
                    "version": 1,
                    "claim_id": id,
                    "params": {"remote_request_id": format!("{} for {id}", self.name)},
                }},
            }),
            None => json!({ "from": self.name }),
        };
        let report = |recovered: &str| {
            json!({"kv_transfer_params": {"kvdelta": {"stale_claim": {
                "version": 1, "claim_id": claim_id, "said_blocks": 16, "had_blocks": 4,
                "reason": "stale", "recovered": recovered,
            }}}})
        };
        let unloaded = json!({"kvdelta": {"stale_claim": {
            "version": 1, "claim_id": "", "said_blocks": 0, "had_blocks": 0,
            "reason": "load_failed", "recovered": "ask_again",
        }}});
        let is_handover = self.is_prefill() && matches!(step, Step::Finish | Step::Told);
        LLMEngineOutput {
            token_ids: match step {
                Step::Stale | Step::Unloaded | Step::Fail => Vec::new(),
                _ => vec![10],
            },
            finish_reason: match step {
                Step::Finish | Step::Told | Step::Recomputed => Some(FinishReason::Length),
                Step::End => Some(FinishReason::EoS),
                Step::Stale | Step::Unloaded | Step::Fail => {
                    Some(FinishReason::Error(format!("{} failed", self.name)))
                }
                _ => None,
            },
            engine_data: match step {
                Step::Stale => Some(report("ask_again")),
                Step::Recomputed => Some(report("recompute")),
                Step::Told => Some(report("sent")),
                Step::Unloaded => Some(unloaded),
                _ => None,
            },
            disaggregated_params: is_handover.then(offer),
            index: Some(0),
            ..LLMEngineOutput::default()
        }
    }

    fn is_prefill(&self) -> bool {
        self.role == WorkerType::Prefill
    }
}

/// The engine of a worker.
pub(super) struct Engine(pub(super) Arc<State>);

#[async_trait]
impl AsyncEngine<SingleIn<Loose>, ManyOut<Annotated<LLMEngineOutput>>, Error> for Engine {
    async fn generate(
        &self,
        input: SingleIn<Loose>,
    ) -> Result<ManyOut<Annotated<LLMEngineOutput>>, Error> {
        let (Loose(request), context) = input.into_parts();
        let context = context.context();
        let state = self.0.clone();
        if request.get("token_ids") == Some(&json!(PROBE)) {
            let output = Annotated::from_data(state.output(&Step::Finish, None));
            let outputs = futures::stream::iter([output]);
            return Ok(ResponseStream::new(outputs.boxed(), context));
        }
        let mut run = Run::begin(state, request, context.clone());
        if let Next::Refused(error) = run.next(&|step| matches!(step, Step::Begin)).await {
            return Err(error.into());
        }
        let outputs = futures::stream::unfold(run, |mut run| async move {
            let is_prefill = run.state.is_prefill();
            let is_cut = run.claim_id.is_some();
            let sends = |step: &Step| match step {
                Step::Token => !is_prefill,
                Step::Stale => is_cut,
                step => matches!(
                    step,
                    Step::Finish
                        | Step::End
                        | Step::Told
                        | Step::Unloaded
                        | Step::Recomputed
                        | Step::Fail
                ),
            };
            match run.next(&sends).await {
                Next::Step(step) => {
                    if !matches!(step, Step::Token) {
                        run.end(Outcome::Finished);
                        run.steps.clear();
                    }
                    Some((Annotated::from_data(run.output(&step)), run))
                }
                Next::Refused(error) => Some((Annotated::from_err(error), run)),
                Next::Ended => None,
            }
        });
        Ok(ResponseStream::new(outputs.boxed(), context))
    }
}

/// A request at its worker.
struct Run {
    state: Arc<State>,
    context: Arc<dyn AsyncEngineContext>,
    steps: VecDeque<Step>,
    place: usize,
    /// The claim that its offer is cut for, or that the offer it got was.
    claim_id: Option<String>,
}

/// What a run comes to.
enum Next {
    Step(Step),
    Refused(DynamoError),
    Ended,
}

/// What unwinds a request of a dead worker, so that its connection closes without an end.
struct Death;

impl Run {
    fn begin(state: Arc<State>, request: Value, context: Arc<dyn AsyncEngineContext>) -> Self {
        let steps = state.script().0.into();
        let mut place = 0;
        let received = Received {
            order: state.order.fetch_add(1, Ordering::SeqCst),
            id: context.id().to_owned(),
            request,
            outcome: Outcome::Running,
        };
        let claim_id = if state.is_prefill() {
            received.claim_id().filter(|_| state.cuts)
        } else {
            received.cut_for()
        };
        let claim_id = claim_id.map(str::to_owned);
        state.received.send_modify(|all| {
            place = all.len();
            all.push(received);
        });
        Self {
            state,
            context,
            steps,
            place,
            claim_id,
        }
    }

    fn output(&self, step: &Step) -> LLMEngineOutput {
        self.state.output(step, self.claim_id.as_deref())
    }

    /// Goes on to the next step that is `wanted`.
    async fn next(&mut self, wanted: &(dyn Fn(&Step) -> bool + Sync)) -> Next {
        self.die_if_dead();
        while let Some(step) = self.steps.pop_front() {
            match step {
                step if wanted(&step) => return Next::Step(step),
                Step::Wait(gate) => {
                    let mut dead = self.state.dead.subscribe();
                    tokio::select! {
                        () = gate.pass() => {}
                        _ = dead.wait_for(|dead| *dead) => {}
                        () = self.context.stopped() => {
                            self.end(Outcome::Aborted);
                            self.steps.clear();
                            return Next::Refused(refusal(ErrorClass::Cancelled, &self.state.name));
                        }
                    }
                    self.die_if_dead();
                }
                Step::Refuse(class) => {
                    self.end(Outcome::Refused);
                    self.steps.clear();
                    return Next::Refused(refusal(class, &self.state.name));
                }
                Step::Die => {
                    self.state.dead.send_replace(true);
                    self.die_if_dead();
                }
                Step::Begin
                | Step::Token
                | Step::Finish
                | Step::End
                | Step::Stale
                | Step::Told
                | Step::Unloaded
                | Step::Recomputed
                | Step::Fail => {}
            }
        }
        Next::Ended
    }

    fn die_if_dead(&self) {
        if *self.state.dead.borrow() {
            self.end(Outcome::Died);
            resume_unwind(Box::new(Death));
        }
    }

    fn end(&self, outcome: Outcome) {
        self.state.received.send_modify(|received| {
            let this = &mut received[self.place];
            if this.outcome == Outcome::Running {
                this.outcome = outcome;
            }
        });
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.end(Outcome::Aborted);
    }
}

fn refusal(class: ErrorClass, name: &str) -> DynamoError {
    DynamoError::builder()
        .class(class)
        .message(format!("{name} refuses as its script says"))
        .build()
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
