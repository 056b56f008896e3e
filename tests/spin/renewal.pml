/* Until when a lease of etcd's certainly lives, with leaders that are stopped and wake at any moment. Read it beside
 * aiodlock/backends/etcd/leases.py; docs/internals/model.md says what it covers.
 *
 * Each term has a leader with its own memory of when the leases end. A leader is elected at any moment, and begins all
 * leases that there are anew. A former one goes on renewing and ending leases until it learns of the new one, which may
 * be never. What it proposes is carried out in any case: ending a lease is not taken back by a later renewal.
 * Renewing is two steps, and time may pass between them: the leader looks whether the lease has run out, and later
 * begins it anew. Answers may be lost.
 *
 * The client's rule is that of leases.py, or without a part of it:
 *   NO_TERM  a renewal counts also for a lease that was made in an earlier term
 *   NO_READ  a renewal counts without a read after the answer
 *   NO_END   a renewal counts also if it is answered after the end of the lease
 */
#ifndef T
#define T 2
#endif
#ifndef MAX
#define MAX 5
#endif
#ifndef TERMS
#define TERMS 2
#endif

#define at(term, lease) ((term) * 2 + (lease))

byte now;
byte top = 1;             /* the term of the leader in office */
bool knows_better[4];     /* this leader has learned that it is none */
byte ends[8];             /* when a lease ends, as the leader of a term has it; 0: it does not know the lease */
bool there[2];            /* leases of the cluster, each with its keys */
bool ending[2];           /* somebody has proposed to end it */

byte key;                 /* the lease that the client's key ends with */
byte deadline;            /* until then the client believes in it */

#define honest assert(!(deadline > now && !there[key]))

active proctype Time() {
  do
  :: atomic { now < MAX -> now++; printf("the time is %d\n", now) }
  od
}

active proctype Elections() {
  do
  :: atomic {
       top < TERMS -> top++;
       if
       :: there[0] -> ends[at(top, 0)] = now + T
       :: else
       fi;
       if
       :: there[1] -> ends[at(top, 1)] = now + T
       :: else
       fi;
       printf("a leader of term %d is elected\n", top)
     }
  od
}

proctype Leader(byte term) {
  do
  :: atomic { term < top && !knows_better[term] -> knows_better[term] = true; printf("leader %d learns of it\n", term) }
  :: atomic {
       term <= top && !knows_better[term] && ends[at(term, 0)] && ends[at(term, 0)] <= now && !ending[0] ->
         ending[0] = true; printf("leader %d proposes to end lease 0\n", term)
     }
  :: atomic {
       term <= top && !knows_better[term] && ends[at(term, 1)] && ends[at(term, 1)] <= now && !ending[1] ->
         ending[1] = true; printf("leader %d proposes to end lease 1\n", term)
     }
  od
}

active proctype Log() {
  do
  :: atomic { ending[0] && there[0] -> there[0] = false; printf("lease 0 ends\n"); honest }
  :: atomic { ending[1] && there[1] -> there[1] = false; printf("lease 1 ends\n"); honest }
  od
}

active proctype Client() {
  byte made = 1;    /* the term in which the lease of the key was made */
  byte sent, header, leader, seen, before;
  bool outdated;

  atomic {
    there[0] = true;
    ends[at(1, 0)] = now + T;
    deadline = now + T;
    run Leader(1); run Leader(2);
#if TERMS > 2
    run Leader(3)
#endif
  };
again:
  do
  :: atomic {
       /* the member has carried out an entry of this term; it asks the leader of this or a later one */
       !outdated && now < MAX ->
         sent = now;
         select(header : 1 .. top)
     };
     atomic {
       if
       :: leader = 1
       :: top >= 2 -> leader = 2
       :: top >= 3 -> leader = 3
       fi;
       leader >= header && !knows_better[leader] && ends[at(leader, key)] > now && (there[key] || leader < top) ->
         printf("leader %d looks at lease %d\n", leader, key)
     };
     atomic {
       ends[at(leader, key)] = now + T;
       printf("leader %d renews lease %d, asked at %d, in term %d\n", leader, key, sent, header)
     };
     if
     :: goto again    /* the answer is lost */
     :: skip
     fi;
#ifndef NO_END
     atomic {
       if
       :: now >= deadline -> outdated = true; goto again
       :: else
       fi
     };
#endif
#ifdef NO_READ
     seen = header;
#else
     atomic { seen = top; printf("a read shows term %d\n", seen) };
#endif
     atomic {
       if
#ifdef NO_TERM
       :: seen == header ->
#else
       :: seen == header && seen == made ->
#endif
          if
          :: sent + T > deadline -> deadline = sent + T; printf("believed until %d\n", deadline)
          :: else
          fi;
          honest
       :: else ->
#ifndef NO_TERM
          outdated = outdated || seen > made || header > made
#endif
       fi;
       sent = 0; header = 0; leader = 0; seen = 0
     }
  :: outdated && key == 0 && now < MAX ->
     atomic { before = top };
     atomic { sent = now };
     atomic {
       there[1] = true;
       ends[at(top, 1)] = now + T;
       made = top;
       printf("lease 1 is made in term %d\n", top)
     };
     if
     :: before != made -> break    /* made in a term that is not known: it is not used */
     :: else
     fi;
     atomic {
       if
       :: there[0] && there[1] ->
          key = 1;
          outdated = false;
          printf("the key is moved\n");
          if
          :: sent + T > deadline -> deadline = sent + T
          :: else
          fi;
          honest
       :: else -> break    /* the key is gone, or this lease: the client knows */
       fi;
       sent = 0; before = 0
     }
  :: now == MAX -> break
  od
}
