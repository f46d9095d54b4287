// SPDX-License-Identifier: Apache-2.0

//! Workers without an engine for the benchmark: they answer at once and publish the KV events of every
//! prompt that they were sent.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
use dynamo_runtime::component::StartedEndpoint;
use dynamo_runtime::engine::AsyncEngineContextProvider;
use dynamo_runtime::pipeline::network::Ingress;
use dynamo_runtime::pipeline::{AsyncEngine, Error, ManyOut, ResponseStream, SingleIn};
use futures::StreamExt;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use super::MODEL;

/// Tokens in a block.
const BLOCK_TOKENS: u32 = 16;
/// Blocks of each worker's device memory: more than a run needs, since nothing is evicted.
const BLOCKS: u64 = 1 << 22;

/// A worker that serves.
pub(super) struct Worker {
    engine: Arc<Engine>,
    runtime: DistributedRuntime,
    _endpoint: StartedEndpoint,
}

impl Worker {
    /// Starts a worker of the role and waits until it can be discovered.
    pub(super) async fn start(
        runtime: DistributedRuntime,
        role: WorkerType,
        model: &Path,
    ) -> Result<Self> {
        let endpoint = runtime
            .namespace("requests")?
            .component(role.as_str())?
            .endpoint("generate");
        // Read by the patched frontends alone.
        let settles_claims = json!({
            "version": 1,
            "block_size": BLOCK_TOKENS,
            "prefix_caching": true,
            "cache_groups": ["full_attention"],
        });
        let mut local = LocalModelBuilder::default()
            .model_path(model.to_owned())
            .model_name(Some(MODEL.to_owned()))
            .kv_cache_block_size(Some(BLOCK_TOKENS))
            .runtime_config(ModelRuntimeConfig {
                total_kv_blocks: Some(BLOCKS),
                max_num_batched_tokens: Some(8192),
                runtime_data: [("decode_cache_info".to_owned(), settles_claims)].into(),
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
        let engine = Arc::new(Engine {
            role,
            events,
            held: Mutex::default(),
            requests: AtomicUsize::new(0),
            claims: AtomicUsize::new(0),
        });
        let serving = endpoint
            .endpoint_builder()
            .handler(Ingress::for_engine(engine.clone())?)
            .start_with_registration()
            .await?;
        Ok(Self {
            engine,
            runtime,
            _endpoint: serving,
        })
    }

    /// Prefill or decode.
    pub(super) fn role(&self) -> WorkerType {
        self.engine.role
    }

    /// Its id in Dynamo.
    pub(super) fn id(&self) -> u64 {
        self.runtime.connection_id()
    }

    /// Requests so far, and how many of them came with a claim.
    pub(super) fn seen(&self) -> (usize, usize) {
        let engine = &self.engine;
        let [requests, claims] = [&engine.requests, &engine.claims].map(count);
        (requests, claims)
    }

    /// Ends what the worker serves.
    pub(super) fn stop(&self) {
        self.runtime.shutdown();
    }
}

fn count(of: &AtomicUsize) -> usize {
    of.load(Ordering::Relaxed)
}

/// What it looks at of a request.
#[derive(Debug, Deserialize)]
struct Request {
    token_ids: Vec<u32>,
    #[serde(default)]
    decode_cache_info: Option<IgnoredAny>,
}

struct Engine {
    role: WorkerType,
    events: KvEventPublisher,
    /// Blocks that it holds, by its own hash of the prefix that ends with each.
    held: Mutex<HashSet<u64>>,
    requests: AtomicUsize,
    claims: AtomicUsize,
}

impl Engine {
    /// Publishes the blocks of the prompt that it did not hold.
    fn store(&self, prompt: &[u32]) -> Result<()> {
        let options = BlockHashOptions::default();
        let blocks = compute_block_hash_for_seq(prompt, BLOCK_TOKENS, options);
        let sequence = compute_seq_hash_for_block(&blocks);
        // Held until the event is out: what follows a block must come after it.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let known = sequence.iter().take_while(|hash| held.contains(*hash));
        let known = known.count();
        held.extend(sequence.iter().skip(known));
        let parent = known.checked_sub(1).and_then(|last| sequence.get(last));
        let stored = blocks.into_iter().zip(&sequence).skip(known);
        let stored = stored.map(|(tokens_hash, hash)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(*hash),
            tokens_hash,
            mm_extra_info: None,
        });
        let stored: Vec<_> = stored.collect();
        if stored.is_empty() {
            return Ok(());
        }
        let event = KvCacheEvent {
            event_id: self.events.next_event_id(),
            data: KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.copied().map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: stored,
            }),
            dp_rank: 0,
        };
        let published = self.events.publish(event);
        published.map_err(|_| anyhow!("the KV events ended"))
    }
}

#[async_trait]
impl AsyncEngine<SingleIn<serde_json::Value>, ManyOut<Annotated<LLMEngineOutput>>, Error>
    for Engine
{
    async fn generate(
        &self,
        input: SingleIn<serde_json::Value>,
    ) -> Result<ManyOut<Annotated<LLMEngineOutput>>, Error> {
        let (request, context) = input.into_parts();
        let request = Request::deserialize(&request).context("a request cannot be read")?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        if request.decode_cache_info.is_some() {
            self.claims.fetch_add(1, Ordering::Relaxed);
        }
        self.store(&request.token_ids)?;
        let prefill = self.role == WorkerType::Prefill;
        let output = LLMEngineOutput {
            token_ids: if prefill { vec![10] } else { vec![10, 11, 12] },
            finish_reason: Some(FinishReason::Length),
            disaggregated_params: prefill.then(|| json!({ "from": "prefill" })),
            index: Some(0),
            ..LLMEngineOutput::default()
        };
        let outputs = futures::stream::once(async move { Annotated::from_data(output) });
        Ok(ResponseStream::new(outputs.boxed(), context.context()))
    }
}
