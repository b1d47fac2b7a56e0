/* plain_pages.c    moves of pages by plain loops */
#include "plain.h"

static void move_page(const PagesParams* p, const PageLayer* layer, const PageItem* page, unsigned head, int to_host) {
    unsigned d = p->head_dim, half = KV_PAGE_TOKENS * d;
    uint16_t* device = layer->device + ((size_t)page->device * p->n_kv_heads + head) * 2 * half;
    uint16_t* host = layer->host + ((size_t)page->host * p->n_kv_heads + head) * 2 * half;
    for (unsigned t = 0; t < KV_PAGE_TOKENS; t++)
        for (unsigned i = 0; i < d; i++) {
            uint16_t *k = host + (t / 16 * (d / 2) + i / 2) * 32 + t % 16 * 2 + i % 2, *v = host + half + (t / 2 * d + i) * 2 + t % 2;
            uint16_t *of_k = device + t * d + i, *of_v = of_k + half;
            int there = t < page->tokens;
            if (to_host) *k = there ? *of_k : 0, *v = there ? *of_v : 0;
            else *of_k = there ? *k : 0, *of_v = there ? *v : 0;
        }
    written((uint64_t)(to_host ? host : device), 4 * half);
}
static int move_pages(const PagesParams* p, int to_host) {
    for (unsigned l = 0; l < p->n_layers; l++)
        for (unsigned i = 0; i < p->n_pages; i++)
            for (unsigned head = 0; head < p->n_kv_heads; head++) move_page(p, p->layers + l, p->pages + i, head, to_host);
    return 0;
}
int pages_to_host(const char* rest, Type type, const void* params) { return move_pages(params, 1); }
int pages_from_host(const char* rest, Type type, const void* params) { return move_pages(params, 0); }
