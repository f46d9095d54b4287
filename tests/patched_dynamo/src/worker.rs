// SPDX-License-Identifier: Apache-2.0

//! Workers without an engine: they answer fixed tokens, keep what they were sent, and publish the
//! KV events that an engine would.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use async_trait::async_trait;
use dynamo_kv_router::compute_block_hash_for_seq;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, compute_seq_hash_for_block,
};
use dynamo_llm::kv_router::publisher::KvEventPublisher;
use dynamo_llm::local_model::LocalModelBuilder;
use dynamo_llm::local_model::runtime_config::ModelRuntimeConfig;
use dynamo_llm::model_type::{ModelInput, ModelType};
use dynamo_llm::protocols::common::FinishReason;
use dynamo_llm::protocols::common::llm_backend::LLMEngineOutput;
use dynamo_llm::types::Annotated;
use dynamo_llm::worker_type::WorkerType;
use dynamo_runtime::DistributedRuntime;
use dynamo_runtime::component::{Endpoint, StartedEndpoint};
use dynamo_runtime::engine::AsyncEngineContextProvider;
use dynamo_runtime::pipeline::network::Ingress;
use dynamo_runtime::pipeline::{AsyncEngine, Error, ManyOut, ResponseStream, SingleIn};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

/// Tokens in a block.
pub(crate) const BLOCK_TOKENS: u32 = 8;
/// A prompt that ends with this token plus a number is answered when that number is released: by
/// the decode worker, or by the prefill worker.
pub(crate) const HELD_IN_DECODE: u32 = 3000;
pub(crate) const HELD_IN_PREFILL: u32 = 3500;
const HOLDS: u32 = 400;

/// A request as one worker got it, undecoded.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Which worker.
    pub(crate) worker: String,
    /// The request.
    pub(crate) request: Value,
}

/// A worker that serves.
pub(crate) struct Worker {
    /// Its name in records.
    pub(crate) name: String,
    /// Its id in Dynamo.
    pub(crate) id: u64,
    /// Its role.
    pub(crate) role: WorkerType,
    events: KvEventPublisher,
    runtime: DistributedRuntime,
    _endpoint: StartedEndpoint,
}

/// The endpoint of all workers of a role.
pub(crate) fn endpoint(runtime: &DistributedRuntime, role: WorkerType) -> Result<Endpoint> {
    Ok(runtime
        .namespace("recorded")?
        .component(role.as_str())?
        .endpoint("generate"))
}

impl Worker {
    /// Starts a worker of the role and waits until it can be discovered.
    pub(crate) async fn start(
        runtime: DistributedRuntime,
        role: WorkerType,
        number: usize,
        model: &Path,
        seen: mpsc::UnboundedSender<Seen>,
        released: watch::Receiver<BTreeSet<u32>>,
    ) -> Result<Self> {
        let name = format!("{} {number}", role.as_str());
        let endpoint = endpoint(&runtime, role)?;
        let mut local = LocalModelBuilder::default()
            .model_path(model.to_owned())
            .model_name(Some("recorded".to_owned()))
            .kv_cache_block_size(Some(BLOCK_TOKENS))
            .runtime_config(ModelRuntimeConfig {
                total_kv_blocks: Some(4096),
                max_num_batched_tokens: Some(8192),
                ..ModelRuntimeConfig::default()
            })
            .build()
            .await?;
        let (surface, needs) = match role {
            WorkerType::Prefill => (ModelType::empty(), WorkerType::Decode),
            _ => (
                ModelType::Chat | ModelType::Completions,
                WorkerType::Prefill,
            ),
        };
        let engine = Arc::new(Engine {
            name: name.clone(),
            role,
            seen,
            released,
        });
        let events = KvEventPublisher::new_with_local_indexer(
            endpoint.clone(),
            BLOCK_TOKENS,
            None,
            true,
            0,
            None,
        )?;
        local
            .attach(
                &endpoint,
                surface,
                ModelInput::Tokens,
                None,
                Some(role),
                vec![vec![needs]],
            )
            .await?;
        let serving = endpoint
            .endpoint_builder()
            .handler(Ingress::for_engine(engine)?)
            .start_with_registration()
            .await?;
        Ok(Self {
            name,
            id: runtime.connection_id(),
            role,
            events,
            runtime,
            _endpoint: serving,
        })
    }

    /// Publishes that the whole blocks of `prompt` are in the worker's device memory.
    pub(crate) fn store(&self, prompt: &[u32]) -> Result<()> {
        let options = BlockHashOptions::default();
        let blocks = compute_block_hash_for_seq(prompt, BLOCK_TOKENS, options);
        if blocks.is_empty() {
            return Ok(());
        }
        let sequence = compute_seq_hash_for_block(&blocks);
        let blocks = blocks
            .into_iter()
            .zip(sequence)
            .map(|(tokens_hash, hash)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(hash),
                tokens_hash,
                mm_extra_info: None,
            })
            .collect();
        self.events
            .publish(KvCacheEvent {
                event_id: self.events.next_event_id(),
                data: KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: None,
                    start_position: None,
                    blocks,
                }),
                dp_rank: 0,
            })
            .map_err(|_| anyhow!("{}: its KV events ended", self.name))
    }

    /// Ends what the worker serves.
    pub(crate) fn stop(&self) {
        self.runtime.shutdown();
    }
}

struct Engine {
    name: String,
    role: WorkerType,
    seen: mpsc::UnboundedSender<Seen>,
    released: watch::Receiver<BTreeSet<u32>>,
}

#[async_trait]
impl AsyncEngine<SingleIn<Value>, ManyOut<Annotated<LLMEngineOutput>>, Error> for Engine {
    async fn generate(
        &self,
        input: SingleIn<Value>,
    ) -> Result<ManyOut<Annotated<LLMEngineOutput>>, Error> {
        let (request, context) = input.into_parts();
        let hold = hold(&request, self.role);
        let prefill = self.role == WorkerType::Prefill;
        let output = LLMEngineOutput {
            token_ids: if prefill { vec![10] } else { vec![10, 11, 12] },
            finish_reason: Some(FinishReason::Length),
            disaggregated_params: prefill.then(|| json!({ "from": self.name })),
            index: Some(0),
            ..LLMEngineOutput::default()
        };
        self.seen.send(Seen {
            worker: self.name.clone(),
            request,
        })?;
        let mut released = self.released.clone();
        let outputs = futures::stream::once(async move {
            if let Some(hold) = hold {
                // The sender lives as long as the stream of requests.
                let _ = released.wait_for(|released| released.contains(&hold)).await;
            }
            Annotated::from_data(output)
        });
        Ok(ResponseStream::new(outputs.boxed(), context.context()))
    }
}

/// The number whose release a worker of this role waits for.
fn hold(request: &Value, role: WorkerType) -> Option<u32> {
    let base = match role {
        WorkerType::Prefill => HELD_IN_PREFILL,
        _ => HELD_IN_DECODE,
    };
    let last = request.get("token_ids")?.as_array()?.last()?.as_u64()?;
    let last = u32::try_from(last).ok()?;
    (base..base + HOLDS).contains(&last).then_some(last)
}

/// The prompt of a request as a worker got it.
pub(crate) fn prompt(request: &Value) -> Result<Vec<u32>> {
    let tokens = request
        .get("token_ids")
        .context("a request came without token_ids")?;
    Ok(serde_json::from_value(tokens.clone())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_held_by_the_role_that_its_last_token_names() {
        let request = |last: u32| json!({ "token_ids": [HELD_IN_DECODE, 7, last] });
        assert_eq!(hold(&request(7), WorkerType::Decode), None);
        assert_eq!(hold(&request(3004), WorkerType::Decode), Some(3004));
        assert_eq!(hold(&request(3004), WorkerType::Prefill), None);
        assert_eq!(hold(&request(3501), WorkerType::Prefill), Some(3501));
        assert_eq!(hold(&request(3501), WorkerType::Decode), None);
        assert_eq!(hold(&json!({}), WorkerType::Decode), None);
    }
}
