//! The Python module `kvdelta`: a thin function for each of this crate's, errors as exceptions. Its documentation
//! is the stub, `kvdelta.pyi`.

use std::num::NonZeroU32;
use std::time::Duration;

use kvdelta_indexer::{BlockSize, EngineHash, Millis};
use kvdelta_protocol::{CacheGroup, DecodeCacheInfo};
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pythonize::{depythonize, pythonize};

use crate::{
    BlockRange, OfferBlocks, OfferHead, Own, Rank, RecoverySettings, Refusal, Shared, Stale,
};

create_exception!(kvdelta, KvdeltaError, PyValueError);
create_exception!(kvdelta, BadClaim, KvdeltaError);
create_exception!(kvdelta, BadOffer, KvdeltaError);
create_exception!(kvdelta, Refused, KvdeltaError);

/// The key of `kv_transfer_params` under which a router's claim stands.
const CLAIM_KEY: &str = "decode_cache_info";

#[pymodule]
mod kvdelta {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::{
        BadClaim, BadOffer, Claim, Closed, Confirmation, Group, KvdeltaError, Ledger, Offer,
        OfferPlan, Recovery, Refused, confirm, pair, plan_offer,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("PROTOCOL_VERSION", kvdelta_protocol::VERSION)?;
        module.add("OFFER_KEY", kvdelta_protocol::OFFER_KEY)?;
        module.add("CLAIM_KEY", super::CLAIM_KEY)
    }
}

fn bad(error: impl ToString) -> PyErr {
    KvdeltaError::new_err(error.to_string())
}

fn tokens(block_size: u32) -> PyResult<BlockSize> {
    BlockSize::try_from(block_size).map_err(bad)
}

fn refused(py: Python<'_>, refusal: Refusal) -> PyErr {
    let error = Refused::new_err(refusal.to_string());
    let reason = error.value(py).setattr("reason", refusal.as_label());
    reason.err().unwrap_or(error)
}

#[pyclass(frozen, module = "kvdelta")]
struct Claim(DecodeCacheInfo);

#[pymethods]
impl Claim {
    #[new]
    fn new(value: &Bound<'_, PyAny>, prompt_tokens: usize) -> PyResult<Self> {
        let claim: DecodeCacheInfo = depythonize(value).map_err(|error| {
            BadClaim::new_err(format!("{CLAIM_KEY} cannot be read: {error}; sending all"))
        })?;
        let checked = claim.check(prompt_tokens);
        checked.map_err(|error| BadClaim::new_err(error.to_string()))?;
        Ok(Self(claim))
    }

    #[getter]
    fn claim_id(&self) -> &str {
        &self.0.claim_id
    }

    #[getter]
    fn decode_worker_id(&self) -> u64 {
        self.0.decode_worker_id.0
    }

    #[getter]
    fn decode_dp_rank(&self) -> u32 {
        self.0.decode_dp_rank.0
    }

    #[getter]
    fn cached_prefix_blocks(&self) -> u32 {
        self.0.cached_prefix_blocks
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.0.block_size.into()
    }

    #[getter]
    fn prefix_hash(&self) -> u64 {
        self.0.prefix_hash.0
    }
}

#[pyclass(frozen, module = "kvdelta")]
struct Group(crate::Group);

#[pymethods]
impl Group {
    #[new]
    fn new(
        kind: &str,
        block_size: u32,
        first_block: u32,
        blocks: u32,
        bytes_per_block: u64,
    ) -> PyResult<Self> {
        let kind = match kind {
            "full_attention" => CacheGroup::FullAttention,
            "mla" => CacheGroup::MlaAttention,
            "sliding_window" => CacheGroup::SlidingWindow,
            "mamba" => CacheGroup::Mamba,
            "unknown" => CacheGroup::Unknown,
            _ => return Err(bad(format!("{kind:?} is no kind of a cache group"))),
        };
        Ok(Self(crate::Group {
            kind,
            block_size: tokens(block_size)?,
            first_block,
            blocks,
            bytes_per_block,
        }))
    }
}

#[pyclass(frozen, module = "kvdelta")]
struct OfferPlan(crate::OfferPlan);

#[pymethods]
impl OfferPlan {
    #[getter]
    fn first_block(&self) -> u32 {
        self.0.first_block
    }

    #[getter]
    fn skip(&self) -> &[u32] {
        &self.0.skip
    }

    #[getter]
    fn group_first_blocks(&self) -> &[u32] {
        &self.0.group_first_blocks
    }

    #[getter]
    fn skipped_blocks(&self) -> u64 {
        self.0.skipped_blocks
    }

    #[getter]
    fn offered_blocks(&self) -> u64 {
        self.0.offered_blocks
    }

    #[getter]
    fn skipped_bytes(&self) -> u64 {
        self.0.skipped_bytes
    }

    #[getter]
    fn offered_bytes(&self) -> u64 {
        self.0.offered_bytes
    }
}

#[pyfunction]
#[pyo3(signature = (claim, *, block_size, prefix_caching, own_hash, groups))]
fn plan_offer(
    py: Python<'_>,
    claim: &Claim,
    block_size: u32,
    prefix_caching: bool,
    own_hash: Option<u64>,
    groups: Vec<PyRef<'_, Group>>,
) -> PyResult<OfferPlan> {
    let own = Own {
        block_size: tokens(block_size)?,
        prefix_caching,
        hash: own_hash.map(EngineHash),
    };
    let groups: Vec<crate::Group> = groups.iter().map(|group| group.0).collect();
    let plan = crate::plan(&claim.0, &own, &groups).map_err(|refusal| refused(py, refusal))?;
    Ok(OfferPlan(plan))
}

#[pyclass(frozen, module = "kvdelta")]
struct Offer(OfferHead);

#[pymethods]
impl Offer {
    #[new]
    fn new(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let head: OfferHead = depythonize(value).map_err(|error| {
            BadOffer::new_err(format!(
                "the offer cannot be read: {error}; computing all here"
            ))
        })?;
        let checked = head.check();
        checked.map_err(|error| BadOffer::new_err(error.to_string()))?;
        Ok(Self(head))
    }

    /// The size of the claim's blocks is that of the worker: no plan is made where they differ.
    #[staticmethod]
    fn cut(claim: &Claim, plan: &OfferPlan, block_size: u32) -> PyResult<Self> {
        let claimed = claim.block_size();
        if claimed != block_size {
            return Err(BadOffer::new_err(format!(
                "blocks of {block_size} tokens, the claim has blocks of {claimed}; sending all"
            )));
        }
        Ok(Self(OfferHead::cut(&claim.0, &plan.0)))
    }

    fn head<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(pythonize(py, &self.0)?)
    }

    #[getter]
    fn claim_id(&self) -> &str {
        &self.0.claim_id
    }

    #[getter]
    fn decode_worker_id(&self) -> u64 {
        self.0.decode_worker_id.0
    }

    #[getter]
    fn prefix_hash(&self) -> u64 {
        self.0.prefix_hash.0
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.0.block_size.into()
    }

    #[getter]
    fn first_block(&self) -> u32 {
        self.0.first_block
    }

    #[getter]
    fn group_first_blocks(&self) -> &[u32] {
        &self.0.group_first_blocks
    }
}

#[pyclass(frozen, module = "kvdelta")]
struct Confirmation(crate::Confirmation);

#[pymethods]
impl Confirmation {
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            crate::Confirmation::Covered { .. } => "covered",
            crate::Confirmation::Stale { .. } => "stale",
            crate::Confirmation::OtherContent { .. } => "content",
        }
    }

    #[getter]
    fn held_blocks(&self) -> u32 {
        self.0.held_blocks()
    }

    #[getter]
    fn short_blocks(&self) -> u32 {
        self.0.short_blocks()
    }
}

#[pyfunction]
#[pyo3(signature = (offer, *, block_size, held_tokens, own_hash))]
fn confirm(
    offer: &Offer,
    block_size: u32,
    held_tokens: usize,
    own_hash: Option<u64>,
) -> PyResult<Confirmation> {
    let own_hash = own_hash.map(EngineHash);
    let confirmation = crate::confirm(&offer.0, tokens(block_size)?, held_tokens, own_hash);
    Ok(Confirmation(confirmation))
}

#[pyfunction]
fn pair(
    prefill_first: u32,
    prefill_blocks: u32,
    decode_first: u32,
    decode_blocks: u32,
) -> (u32, u32, u32) {
    let prefill = BlockRange {
        first: prefill_first,
        blocks: prefill_blocks,
    };
    let decode = BlockRange {
        first: decode_first,
        blocks: decode_blocks,
    };
    let paired = crate::pair(prefill, decode);
    (paired.prefill_at, paired.decode_at, paired.blocks)
}

#[pyclass(frozen, module = "kvdelta")]
struct Closed(crate::Closed);

#[pymethods]
impl Closed {
    #[getter]
    fn ending(&self) -> &'static str {
        self.0.ending.label()
    }

    #[getter]
    fn pinned_block_ms(&self) -> u64 {
        self.0.pinned_block_ms
    }
}

#[pyclass(frozen, module = "kvdelta")]
struct Ledger(Shared<crate::Ledger>);

#[pymethods]
impl Ledger {
    #[new]
    fn new(ranks: u32) -> PyResult<Self> {
        let ranks = NonZeroU32::new(ranks);
        let ranks = ranks.ok_or_else(|| bad("a ledger of 0 ranks; there is at least 1"))?;
        Ok(Self(Shared::new(crate::Ledger::new(ranks))))
    }

    fn open(
        &self,
        request_id: &str,
        skipped_blocks: u64,
        offered_blocks: u64,
        now_ms: u64,
        lease_ms: u64,
    ) -> bool {
        let blocks = OfferBlocks {
            skipped: skipped_blocks,
            offered: offered_blocks,
        };
        let lease = Duration::from_millis(lease_ms);
        self.0
            .with(|ledger| ledger.open(request_id, blocks, Millis(now_ms), lease))
    }

    fn release_skipped(&self, request_id: &str) -> u64 {
        self.0.with(|ledger| ledger.release_skipped(request_id))
    }

    fn notice(&self, request_id: &str, rank: u32, now_ms: u64) -> Option<Closed> {
        let closed = self
            .0
            .with(|ledger| ledger.notice(request_id, Rank(rank), Millis(now_ms)));
        closed.map(Closed)
    }

    fn close(&self, request_id: &str, ending: &str, now_ms: u64) -> PyResult<Option<Closed>> {
        let ending = ending.parse::<crate::Ending>().map_err(bad)?;
        let closed = self
            .0
            .with(|ledger| ledger.close(request_id, ending, Millis(now_ms)));
        Ok(closed.map(Closed))
    }

    fn extend(&self, request_id: &str, now_ms: u64, lease_ms: u64) -> bool {
        let lease = Duration::from_millis(lease_ms);
        self.0
            .with(|ledger| ledger.extend(request_id, Millis(now_ms), lease))
    }

    fn expire(&self, now_ms: u64) -> Vec<(String, Closed)> {
        let expired = self.0.with(|ledger| ledger.expire(Millis(now_ms)));
        expired
            .into_iter()
            .map(|(request, closed)| (request.as_ref().to_owned(), Closed(closed)))
            .collect()
    }

    fn pinned_blocks(&self) -> u64 {
        self.0.with(|ledger| ledger.pinned_blocks())
    }

    fn __len__(&self) -> usize {
        self.0.with(|ledger| ledger.len())
    }
}

#[pyclass(frozen, module = "kvdelta")]
struct Recovery(Shared<crate::Recovery>);

#[pymethods]
impl Recovery {
    // The defaults are those of RecoverySettings, spelt out since Python shows them.
    #[new]
    #[pyo3(signature = (
        *,
        prefill_tokens_per_second = 10_000.0,
        decode_tokens_per_second = 5_000.0,
        link_bytes_per_second = 1.25e9,
        budget = 10,
        budget_per_second = 1.0,
        share = 0.1,
    ))]
    fn new(
        prefill_tokens_per_second: f64,
        decode_tokens_per_second: f64,
        link_bytes_per_second: f64,
        budget: u32,
        budget_per_second: f64,
        share: f64,
    ) -> PyResult<Self> {
        let recovery = crate::Recovery::new(RecoverySettings {
            prefill_tokens_per_second,
            decode_tokens_per_second,
            link_bytes_per_second,
            budget,
            budget_per_second,
            share,
        });
        Ok(Self(Shared::new(recovery.map_err(bad)?)))
    }

    #[pyo3(signature = (*, missing_tokens, context_tokens, offered_bytes, skipped_bytes, now_ms))]
    fn choose(
        &self,
        missing_tokens: u64,
        context_tokens: u64,
        offered_bytes: u64,
        skipped_bytes: u64,
        now_ms: u64,
    ) -> &'static str {
        let stale = Stale {
            missing_tokens,
            context_tokens,
            offered_bytes,
            skipped_bytes,
        };
        self.0
            .with(|recovery| recovery.choose(&stale, Millis(now_ms)))
            .label()
    }

    fn confirmed(&self, now_ms: u64) {
        self.0.with(|recovery| recovery.confirmed(Millis(now_ms)));
    }

    fn observe_decode_prefill(&self, tokens: u64, ms: f64) {
        self.0
            .with(|recovery| recovery.observe_decode_prefill(tokens, ms));
    }

    fn observe_transfer(&self, transferred_bytes: u64, ms: f64) {
        self.0
            .with(|recovery| recovery.observe_transfer(transferred_bytes, ms));
    }

    #[getter]
    fn decode_tokens_per_second(&self) -> f64 {
        self.0.with(|recovery| recovery.decode_rate().per_second())
    }

    #[getter]
    fn link_bytes_per_second(&self) -> f64 {
        self.0.with(|recovery| recovery.link_rate().per_second())
    }
}
