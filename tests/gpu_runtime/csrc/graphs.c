// CUDA graphs: nodes with their dependencies. A launch makes an operation of every node; nothing but dependencies orders them.
//
// An instantiated graph is the graph itself: XLA changes nodes only through it.
#include "stand_in.h"

struct Node {
  int type, index, count;  // count: of dependencies
  struct Node** after;
  struct Graph* child;
  Work* work;
};
struct Graph {
  int id, references, count;
  struct Node** nodes;
};
static int graph_count;

static void drop_graph(struct Graph* g) {
  if (--g->references) return;
  for (int i = 0; i < g->count; i++) {
    struct Node* n = g->nodes[i];
    if (n->child) drop_graph(n->child);
    drop_work(n->work);
    free(n->after);
    free(n);
  }
  free(g->nodes);
  free(g);
}

// Lock held; takes over the reference to the work.
static struct Node* add_node(struct Graph* g, struct Node* const* after, int count, int type, Work* work) {
  struct Node* n = calloc(1, sizeof *n);
  *n = (struct Node){.type = type, .index = g->count, .count = count, .work = work};
  n->after = malloc(sizeof *n->after * (size_t)(count + 1));
  if (count) memcpy(n->after, after, sizeof *n->after * (size_t)count);
  g->nodes = realloc(g->nodes, sizeof *g->nodes * (size_t)(g->count + 1));
  g->nodes[g->count++] = n;
  return n;
}

static int type_of(const Work* work) {
  return !strcmp(work->word, "COPY") ? NODE_MEMCPY : !strcmp(work->word, "SET") ? NODE_MEMSET : NODE_KERNEL;
}

void capture_work(Capture* capture, Work* work) {
  struct Node* n = add_node(capture->graph, capture->last, capture->count, type_of(work), work);
  capture->last = realloc(capture->last, sizeof *capture->last);
  capture->last[0] = n;
  capture->count = 1;
}

static Work* empty_work(void) { return new_work(sizeof(Work), "EMPTY", NULL, NULL); }

// ---- what a node does, from its parameters
static CUresult kernel_node_work(const KernelNodeParams* p, Work** out) {
  Launch launch = {(Function*)p->function, p->grid, p->block, p->shared_bytes, p->params, p->extra};
  return kernel_work(&launch, out);
}

static uintptr_t address_of(const Copy3DSide* side) {
  uintptr_t start = side->memory_type == MEMORY_TYPE_HOST ? (uintptr_t)side->host : (uintptr_t)side->device;
  return start + side->x_bytes;
}
static CUresult memcpy_node_work(const Copy3D* p, Work** out) {
  if (p->height > 1 || p->depth > 1) return refuse(CUDA_ERROR_NOT_SUPPORTED, "a memcpy node of more than one row");
  *out = copy_work(address_of(&p->destination), address_of(&p->source), p->width_bytes);
  return CUDA_SUCCESS;
}

static CUresult memset_node_work(const MemsetNodeParams* p, Work** out) {
  if (p->height > 1) return refuse(CUDA_ERROR_NOT_SUPPORTED, "a memset node of more than one row");
  *out = set_work(p->destination, p->value, (int)p->element_bytes, p->width);
  return CUDA_SUCCESS;
}

static CUresult node_work(const CUgraphNodeParams* p, Work** out) {
  switch (p->type) {
    case NODE_KERNEL: return kernel_node_work(&p->kernel, out);
    case NODE_MEMCPY: return memcpy_node_work(&p->memcpy.copy, out);
    case NODE_MEMSET: return memset_node_work(&p->memset, out);
    case NODE_EMPTY:
    case NODE_GRAPH: *out = empty_work(); return CUDA_SUCCESS;
    default: return refuse(CUDA_ERROR_NOT_SUPPORTED, "a graph node of type %d", p->type);
  }
}

static CUresult add(CUgraphNode* out, CUgraph g, const CUgraphNode* after, size_t count, int type, Work* work, CUgraph child) {
  pthread_mutex_lock(&device_lock);
  *out = add_node(g, after, (int)count, type, work);
  if (child) {
    (*out)->child = child;
    child->references++;
  }
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}

static CUresult replace(CUgraphNode n, Work* work) {
  pthread_mutex_lock(&device_lock);
  Work* old = n->work;
  n->work = work;
  pthread_mutex_unlock(&device_lock);
  drop_work(old);
  return CUDA_SUCCESS;
}

static CUresult replace_child(CUgraphNode n, CUgraph child) {
  pthread_mutex_lock(&device_lock);
  child->references++;
  drop_graph(n->child);
  n->child = child;
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}

// ---- the driver's calls
EXPORT CUresult cuGraphCreate(CUgraph* out, UNUSED unsigned flags) {
  CALLED;
  *out = calloc(1, sizeof **out);
  (*out)->id = __atomic_add_fetch(&graph_count, 1, __ATOMIC_RELAXED);
  (*out)->references = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphDestroy(CUgraph g) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  drop_graph(g);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphExecDestroy(CUgraphExec g) {
  CALLED;
  return cuGraphDestroy(g);
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph g, UNUSED unsigned long long flags) {
  CALLED;
  pthread_mutex_lock(&device_lock);
  g->references++;
  pthread_mutex_unlock(&device_lock);
  *out = g;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphUpload(UNUSED CUgraphExec g, UNUSED CUstream stream) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphDebugDotPrint(UNUSED CUgraph g, UNUSED const char* path, UNUSED unsigned flags) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode* out, CUgraph g, const CUgraphNode* after, size_t count) {
  CALLED;
  return add(out, g, after, count, NODE_EMPTY, empty_work(), NULL);
}
EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph g, const CUgraphNode* after, size_t count,
                                        const KernelNodeParams* params) {
  CALLED;
  Work* work = NULL;
  CUresult status = kernel_node_work(params, &work);
  return status ? status : add(out, g, after, count, NODE_KERNEL, work, NULL);
}
EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode* out, CUgraph g, const CUgraphNode* after, size_t count, const Copy3D* params,
                                     UNUSED CUcontext context) {
  CALLED;
  Work* work = NULL;
  CUresult status = memcpy_node_work(params, &work);
  return status ? status : add(out, g, after, count, NODE_MEMCPY, work, NULL);
}
EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode* out, CUgraph g, const CUgraphNode* after, size_t count,
                                     const MemsetNodeParams* params, UNUSED CUcontext context) {
  CALLED;
  Work* work = NULL;
  CUresult status = memset_node_work(params, &work);
  return status ? status : add(out, g, after, count, NODE_MEMSET, work, NULL);
}
EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph g, const CUgraphNode* after, size_t count, CUgraph child) {
  CALLED;
  return add(out, g, after, count, NODE_GRAPH, empty_work(), child);
}
EXPORT CUresult cuGraphAddNode_v2(CUgraphNode* out, CUgraph g, const CUgraphNode* after, UNUSED const void* edges, size_t count,
                                  const CUgraphNodeParams* params) {
  CALLED;
  Work* work = NULL;
  CUresult status = node_work(params, &work);
  if (status) return status;
  return add(out, g, after, count, params->type, work, params->type == NODE_GRAPH ? params->child : NULL);
}
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(UNUSED CUgraphExec g, CUgraphNode n, const KernelNodeParams* params) {
  CALLED;
  Work* work = NULL;
  CUresult status = kernel_node_work(params, &work);
  return status ? status : replace(n, work);
}
EXPORT CUresult cuGraphExecMemcpyNodeSetParams(UNUSED CUgraphExec g, CUgraphNode n, const Copy3D* params,
                                               UNUSED CUcontext context) {
  CALLED;
  Work* work = NULL;
  CUresult status = memcpy_node_work(params, &work);
  return status ? status : replace(n, work);
}
EXPORT CUresult cuGraphExecMemsetNodeSetParams(UNUSED CUgraphExec g, CUgraphNode n, const MemsetNodeParams* params,
                                               UNUSED CUcontext context) {
  CALLED;
  Work* work = NULL;
  CUresult status = memset_node_work(params, &work);
  return status ? status : replace(n, work);
}
EXPORT CUresult cuGraphExecChildGraphNodeSetParams(UNUSED CUgraphExec g, CUgraphNode n, CUgraph child) {
  CALLED;
  return replace_child(n, child);
}
EXPORT CUresult cuGraphExecNodeSetParams(UNUSED CUgraphExec g, CUgraphNode n, const CUgraphNodeParams* params) {
  CALLED;
  if (params->type == NODE_GRAPH) return replace_child(n, params->child);
  Work* work = NULL;
  CUresult status = node_work(params, &work);
  return status ? status : replace(n, work);
}
EXPORT CUresult cuGraphKernelNodeSetAttribute(UNUSED CUgraphNode n, UNUSED int attribute, UNUSED const void* value) {
  CALLED;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode n, CUgraph* out) {
  CALLED;
  *out = n->child;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphNodeGetType(CUgraphNode n, int* out) {
  CALLED;
  *out = n->type;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphGetNodes(CUgraph g, CUgraphNode* out, size_t* count) {
  CALLED;
  for (int i = 0; out && i < g->count && (size_t)i < *count; i++) out[i] = g->nodes[i];
  *count = (size_t)g->count;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphGetRootNodes(CUgraph g, CUgraphNode* out, size_t* count) {
  CALLED;
  size_t found = 0;
  for (int i = 0; i < g->count; i++) {
    if (g->nodes[i]->count) continue;
    if (out && found < *count) out[found] = g->nodes[i];
    found++;
  }
  *count = found;
  return CUDA_SUCCESS;
}

// ---- launches; the lock is held
typedef struct {
  uint64_t number;  // of the operation that begins the launch
  Text order;
} LaunchLog;

static Operation* begin_and_log(LaunchLog* log, Work* work, Operation* const* after, int count) {
  work->references++;
  Operation* o = begin_node(work, after, count);
  log->order.length = 0;
  for (int i = 0; i < count; i++) text_add(&log->order, i ? ",q%lu" : "q%lu", number_of(after[i]));
  log_line("NODE q%lu of q%lu after %s", number_of(o), log->number, log->order.at);
  log_line("%s q%lu g%lu%s%s", work->word, number_of(o), log->number, work->text ? " " : "", work->text ? work->text : "");
  return o;
}

static Operation** launch_nodes(LaunchLog* log, struct Graph* g, Operation* first);

// A child graph stands between two operations that do nothing.
static Operation* launch_child(LaunchLog* log, struct Node* n, Operation* const* after, int count) {
  Operation* first = begin_and_log(log, n->work, after, count);
  Operation** inner = launch_nodes(log, n->child, first);
  Operation* last = begin_and_log(log, n->work, n->child->count ? inner : &first, n->child->count ? n->child->count : 1);
  for (int i = 0; i < n->child->count; i++) drop_operation(inner[i]);
  free(inner);
  drop_operation(first);
  return last;
}

// The operations of all nodes, which the caller drops.
static Operation** launch_nodes(LaunchLog* log, struct Graph* g, Operation* first) {
  Operation** made = malloc(sizeof *made * (size_t)(g->count + 1));
  for (int i = 0; i < g->count; i++) {
    struct Node* n = g->nodes[i];
    Operation* after[n->count + 1];
    int count = n->count ? n->count : 1;
    after[0] = first;
    for (int d = 0; d < n->count; d++) after[d] = made[n->after[d]->index];
    made[i] = n->child ? launch_child(log, n, after, count) : begin_and_log(log, n->work, after, count);
  }
  return made;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec g, CUstream handle) {
  CALLED;
  CUstream stream = stream_of(handle);
  pthread_mutex_lock(&device_lock);
  Operation* first = append(stream, empty_work(), NULL, 0);
  LaunchLog log = {.number = number_of(first)};
  log_line("GRAPH G%d q%lu s%d nodes=%d", g->id, log.number, id_of(stream), g->count);
  Operation** nodes = launch_nodes(&log, g, first);
  Operation* last = append(stream, empty_work(), nodes, g->count);
  log.order.length = 0;
  for (int i = 0; i < g->count; i++) text_add(&log.order, i ? ",q%lu" : "q%lu", number_of(nodes[i]));
  log_line("GRAPHEND q%lu s%d of q%lu after %s", number_of(last), id_of(stream), log.number, g->count ? log.order.at : "-");
  for (int i = 0; i < g->count; i++) drop_operation(nodes[i]);
  free(nodes);
  free(log.order.at);
  drop_operation(first);
  drop_operation(last);
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
