//! What requests are answered from: one generation of the snapshot, and what is made of it.
//!
//! A batch takes it once, so that rows, ids and dense weights of an answer belong together.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};
use tierbed_snapshot::{PublishedIds, View};

use crate::features::{resolve, Feature, ServedFeature};
use crate::plans::Plans;
use crate::query::Source;
use crate::routes::Service;
use crate::server::Predictor;

/// Generations whose parts are kept: those that lookups may still have, and one that comes.
const KEPT: usize = 3;

/// What a server makes of a generation.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) identity: Arc<str>,
    pub(crate) ids: Arc<PublishedIds>,
    pub(crate) features: Vec<Feature>,
    pub(crate) plans: Plans,
    pub(crate) predictor: Option<Arc<dyn Predictor>>,
}

/// The newest generations of a server.
#[derive(Debug)]
pub(crate) struct Generations {
    features: Option<Vec<ServedFeature>>,
    predictor: Option<Arc<dyn Predictor>>,
    /// Newest last.
    known: Mutex<Vec<Arc<Parts>>>,
}

impl Generations {
    pub(crate) fn new(
        features: Option<Vec<ServedFeature>>,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Self {
        Self { features, predictor, known: Mutex::default() }
    }

    /// Whether predictions are answered.
    pub(crate) fn predicts(&self) -> bool {
        self.predictor.is_some()
    }

    /// Returns what was made of `view`, or makes it.
    ///
    /// # Errors
    /// `Invalid` for features that do not fit the tables, `Corruption` for attachments that cannot
    /// be read; those of the predictor.
    pub(crate) fn of(&self, view: &View<'_>) -> Result<Arc<Parts>> {
        let of_view = |parts: &&Arc<Parts>| parts.identity == *view.identity();
        let known = self.lock();
        if let Some(parts) = known.iter().find(of_view) {
            return Ok(Arc::clone(parts));
        }
        let newest = known.last().and_then(|parts| parts.predictor.clone());
        // Requests go on meanwhile: a model may take its time.
        drop(known);
        let next = self.predictor.as_ref().map(|predictor| predictor.next(view));
        let parts = Arc::new(Parts {
            identity: Arc::clone(view.identity()),
            ids: view.ids()?,
            features: resolve(view, self.features.as_deref())?,
            plans: Plans::default(),
            // A generation without a model of its own goes on with the one before.
            predictor: next.transpose()?.flatten().or(newest).or_else(|| self.predictor.clone()),
        });
        let mut known = self.lock();
        if let Some(parts) = known.iter().find(of_view) {
            return Ok(Arc::clone(parts));
        }
        if known.len() == KEPT {
            known.remove(0);
        }
        known.push(Arc::clone(&parts));
        Ok(parts)
    }

    // Entries are whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Parts>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server, and the generation that it answers from.
#[derive(Debug)]
pub(crate) struct Serving<'a> {
    service: &'a Service,
    pub(crate) view: View<'a>,
    pub(crate) parts: Arc<Parts>,
}

impl Service {
    /// Returns what was made of the newest generation, for who tells of the server.
    pub(crate) fn newest(&self) -> Arc<Parts> {
        let Some(newest) = self.generations.lock().last().cloned() else {
            panic!("a server starts with a generation");
        };
        newest
    }

    /// Takes the generation that answers now.
    ///
    /// # Errors
    /// As [`Generations::of`], where nobody had asked for it before.
    pub(crate) fn serving(&self) -> Result<Serving<'_>> {
        let view = self.snapshot.view();
        let parts = self.generations.of(&view)?;
        Ok(Serving { service: self, view, parts })
    }
}

impl Serving<'_> {
    /// Returns the model of this generation.
    ///
    /// # Errors
    /// `Unsupported` where there is none.
    pub(crate) fn predictor(&self) -> Result<&dyn Predictor> {
        let predictor = self.parts.predictor.as_deref();
        predictor.ok_or_else(|| Error::unsupported("this server has no model"))
    }

    pub(crate) fn source(&self) -> Source<'_> {
        let Parts { ids, features, plans, .. } = &*self.parts;
        Source { snapshot: &self.view, ids, features, plans }
    }
}

impl Deref for Serving<'_> {
    type Target = Service;

    fn deref(&self) -> &Service {
        self.service
    }
}
